"""`python -m fedseal`."""

from fedseal.cli.main import main

main()
