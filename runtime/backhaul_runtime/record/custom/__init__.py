"""Records custom autograd functions and ops of other libraries: `CustomFunctions`."""
