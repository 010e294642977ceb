"""How each op of the package becomes Inductor's code, and the kernels behind it. ``register.py`` lists them."""
