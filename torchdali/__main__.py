"""``python -m torchdali``, which is the command ``torchdali``."""

from torchdali.cli import main

main()
