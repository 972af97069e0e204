"""``python -m csd_policy VERB``, the same as ``csd-policy VERB``."""

import sys

from csd_policy.cli import main

if __name__ == "__main__":
    sys.exit(main())
