"""The DataLoader surface: arguments, epochs, and what `explain()` and `stats()` say."""

from torchdali.loader.loader import DALILoader

__all__ = ["DALILoader"]
