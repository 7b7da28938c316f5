"""TurbaNet: train hundreds of small neural networks at once.

The public names stand in `__init__.pyi` beside this file; each is loaded when it is first used.
"""

import lazy_loader

__version__ = "0.6.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
