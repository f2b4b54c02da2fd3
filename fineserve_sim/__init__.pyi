from fineserve_sim.api import Plan as Plan
from fineserve_sim.api import Result as Result
from fineserve_sim.api import Sizing as Sizing
from fineserve_sim.api import compare as compare
from fineserve_sim.api import plan as plan
from fineserve_sim.api import read as read
from fineserve_sim.api import run as run
from fineserve_sim.api import size as size

__version__: str
