"""Parts of the rollout service's tests serve whole runs too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "rollout"))
