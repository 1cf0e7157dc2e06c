"""`python -m hf_ensemble.cli`, the same as `hf-ensemble`."""

import sys

from . import main

sys.exit(main())
