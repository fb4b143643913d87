"""Records a running call as a program."""
