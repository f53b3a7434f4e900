"""``python -m torchdali``, which is the command ``torchdali``."""

from torchdali.tools.cli import main

main()
