"""TurbaNet: train hundreds of small neural networks at once.

The public names stand in `__init__.pyi` beside this file; each is loaded when it is first used.
"""

import sys

import lazy_loader

from turbanet import moved

__version__ = "0.7.0"
_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
sys.meta_path.insert(0, moved.Finder())


def __getattr__(name):
    return _load(name) if name in __all__ else moved.find(name)
