"""Images as features of a frozen backbone: computed once from a folder, then read like any other dataset.

`extraction.extract` makes such a file and needs the extra `vision`; reading one needs nothing but numpy.
"""

from fedunfold.data.vision.files import Features, load_features
from fedunfold.data.vision.splitting import split

__all__ = ["Features", "load_features", "split"]
