"""What the commands ``check``, ``explain`` and ``preview`` do; their options and exit codes are in ``cli.py``."""
