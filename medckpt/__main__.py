"""Lets `python -m medckpt` work."""

import sys

from medckpt.cli import main

sys.exit(main())
