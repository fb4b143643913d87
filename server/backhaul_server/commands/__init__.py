"""The commands `health`, `token` and `top`, which serve nothing themselves."""
