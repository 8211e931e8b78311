"""Train with JAX: `python examples/train_jax.py FOLDER`. Batches are JAX arrays, and the checkpoint contains the loader's state."""

import json
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import penstock as ps
from penstock import transforms as T
from sklearn.datasets import load_digits


def main(folder: pathlib.Path) -> None:
    data = load_digits()
    ds = ps.create(folder / "digits", {"image": ps.Image(), "label": ps.Label([str(digit) for digit in range(10)])})
    ds.append({"image": [np.repeat(image[..., None] * 15, 3, 2).astype(np.uint8) for image in data.images], "label": data.target})

    def logits(weights, x):
        hidden = jax.nn.relu(x.reshape(len(x), -1) @ weights["first"])
        return hidden @ weights["second"]

    @jax.jit
    def step(weights, x, y):
        def loss(weights):
            return -jnp.mean(jax.nn.log_softmax(logits(weights, x))[jnp.arange(len(y)), y])

        value, gradient = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda weight, slope: weight - 0.3 * slope, weights, gradient), value

    first, second = jax.random.split(jax.random.key(0))
    weights = {"first": jax.random.normal(first, (192, 64)) * 0.1, "second": jax.random.normal(second, (64, 10)) * 0.1}

    def loader():
        transform = [T.RandomCrop(8, padding=1), T.Normalize([0.5], [0.5])]
        return ds.loader(batch_size=64, shuffle=True, seed=3, transform=transform, output="jax", last_batch="drop")

    batches = loader()
    for batch in batches.stream(6):
        weights, loss = step(weights, batch["image"], batch["label"])
    checkpoint = json.dumps(batches.state_dict())
    batches = loader()
    batches.load_state_dict(json.loads(checkpoint))  # A process that resumes after a crash would do the same.
    for batch in batches.stream(12):
        weights, loss = step(weights, batch["image"], batch["label"])
    plain = next(iter(ds.loader(batch_size=len(ds), transform=[T.CenterCrop(8), T.Normalize([0.5], [0.5])], output="jax")))
    right = float((logits(weights, plain["image"]).argmax(1) == plain["label"]).mean())
    print(f"done: loss {float(loss):.3f}, {right:.1%} of the digits correct on {jax.devices()[0].platform}")
    assert right > 0.85


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
