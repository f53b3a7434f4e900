"""Questions of their own, each a script."""
