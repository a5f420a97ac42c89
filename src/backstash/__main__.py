"""``python -m backstash``."""

from backstash.cli import main

raise SystemExit(main())
