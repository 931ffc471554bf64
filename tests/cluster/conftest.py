"""Light runs of the launcher's tests serve those of several hosts too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "launch"))
