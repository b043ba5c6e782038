from medckpt.forecasting import *  # noqa: F403
from medckpt.forecasting import Forecast, forecast  # noqa: F401
