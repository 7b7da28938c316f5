"""MNIST by the original tensorflow-datasets builder from files or the network, and its stand-in."""

import gzip
import os

import numpy as np

from study.sources import tfds as builders

SETTINGS = {}
FILES = tuple(f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))


def address():
    """Return the address that is requested to check for a network."""
    from tensorflow_datasets.image_classification import mnist

    return mnist.MNIST.URL


def from_file(folder):
    """Read the four original files in `folder`; FileNotFoundError without any, ValueError if one is damaged."""
    if not any(os.path.lexists(folder / name) for name in FILES):
        raise FileNotFoundError(f"none of {', '.join(FILES)} is in {folder}.")
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise ValueError(
            f"MNIST needs its four original files in {folder}, but {', '.join(missing)} cannot be read "
            "there; add the missing ones or remove the others."
        )
    return _build(folder, f"put the original files into {folder}")


def from_network():
    """Download and read the same four files; ConnectionError if that fails, ValueError if they are damaged."""
    return _build(None, "run it again")


def embedded(seed=0):
    """Shape scikit-learn's digits as MNIST's: 8 x 8 pixels of 0 to 16 enlarged to 20 x 20 of 0 to 255, in 28 x 28.

    The split is 80/20, stratified.
    """
    import PIL
    import sklearn
    from PIL import Image
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x = np.rint(x.reshape(-1, 8, 8) * 255 / 16).astype(np.uint8)
    x = np.stack([Image.fromarray(digit).resize((20, 20), Image.Resampling.BILINEAR) for digit in x])
    x = np.pad(x, [(0, 0), (4, 4), (4, 4)])
    x_train, x_test, y_train, y_test = train_test_split(
        x, y.astype(np.int32), test_size=0.2, stratify=y, random_state=seed
    )
    facts = {
        "title": "scikit-learn digits, a stand-in for MNIST",
        "real": False,
        "versions": {"scikit-learn": sklearn.__version__, "pillow": PIL.__version__},
        "inputs": {},
        "notes": ["1797 images of 8 x 8 pixels, enlarged: scores are not comparable to MNIST's."],
    }
    return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}, facts


def _build(folder, remedy):
    return builders.build(_builder, "MNIST", folder, remedy, shape=(28, 28))


def _builder():
    from PIL import Image
    from tensorflow_datasets.image_classification import mnist

    class WithoutTensorFlow(mnist.MNIST, skip_registration=True):
        """The original builder with gzip, NumPy and PIL as readers instead of TensorFlow."""

        name = "mnist"

        @staticmethod
        def source():
            return mnist.MNIST.URL

        def _split_generators(self, dl_manager):
            dl_manager.download_and_extract = dl_manager.download
            return super()._split_generators(dl_manager)

        def _generate_examples(self, num_examples, data_path, label_path):
            images = np.frombuffer(gzip.decompress(data_path.read_bytes()), np.uint8, offset=16)
            labels = np.frombuffer(gzip.decompress(label_path.read_bytes()), np.uint8, offset=8)
            images = images.reshape(num_examples, 28, 28)
            for row, (image, label) in enumerate(zip(images, labels, strict=True)):
                yield row, {"image": Image.fromarray(image), "label": int(label)}

    return WithoutTensorFlow
