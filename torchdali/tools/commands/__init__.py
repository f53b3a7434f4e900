"""Commands ``check``, ``explain`` and ``preview``. Their options and exit codes are in ``cli.py``."""
