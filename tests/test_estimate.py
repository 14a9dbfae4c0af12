from fedseal import estimate
from fedseal.config import load_config
from fedseal.models import ModelSettings


def test_images_of_a_run_by_hand() -> None:
    # 2 rounds of: 5 epochs of 500 labels, and w and its average on 10,000 + 10 * 300 test images
    server_sl = load_config("fmnist-lenet", {"method": "server-sl", "rounds": 2})
    assert estimate.images(server_sl) == (2 * (2500 + 2 * 13000 / 3), 0)
    # clients: 5 epochs of 10 times 1,200 images, a quarter more for views
    fixmatch = load_config("fmnist-lenet", {"method": "fedavg-fixmatch", "rounds": 2})
    assert estimate.images(fixmatch) == (2 * (2500 + 2 * 13000 / 3), 2 * 75000)
    # FedSEAL predicts all 12,000, though 5 clients learn, and starts with 750 epochs of 500 labels
    fedseal = load_config("fmnist-lenet", {"rounds": 2, "cohort": 5})
    assert estimate.images(fedseal) == (750 * 500 + 2 * (2500 + 2 * 13000 / 3), 2 * (37500 + 4000))


def test_a_larger_network_takes_longer() -> None:
    shape = (3, 32, 32)
    small, large = (ModelSettings(name="resnet9", width=width) for width in (4, 64))
    assert estimate.seconds_per_image(large, shape) > estimate.seconds_per_image(small, shape) > 0
