"""``python -m tests.fuzz``, or ``python tests/fuzz``."""

import sys
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.fuzz.cli import main

sys.exit(main())
