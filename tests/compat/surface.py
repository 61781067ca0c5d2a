"""The import paths, names and signatures that users' code relies on.

Each entry of `PRESENT` is a name in the module above it, dotted for members. Parameters in brackets
are those a caller may pass, in this order: `=...` is any default, `_` any name, and brackets
followed by `*` stand for a callable of which only these first parameters are promised.
"""

from tests.compat.surface_09 import SECOND_GENERATION
from tests.compat.surface_batch import BATCH_AND_CONTROLLER
from tests.compat.surface_loop import LOOP
from tests.compat.surface_recipes import RECIPES
from tests.compat.surface_training import TRAINING
from tests.compat.surface_utils import UTILITIES

PRESENT = {**BATCH_AND_CONTROLLER, **LOOP, **TRAINING, **UTILITIES, **RECIPES, **SECOND_GENERATION}
