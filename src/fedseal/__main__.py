"""`python -m fedseal`."""

from fedseal.cli import main

main()
