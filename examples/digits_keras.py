"""Handwritten digits with a Horovod script for Keras, of which only the import was changed.

    gradwire run -np 4 -- python examples/digits_keras.py

It runs with Keras' backends TensorFlow and PyTorch (KERAS_BACKEND=torch).
"""

import keras

import gradwire.keras as hvd  # was: import horovod.keras as hvd
from digits_arguments import arguments
from digits_arrays import fingerprint, load, network


def main() -> None:
    given = arguments(__doc__).parse_args()

    hvd.init()
    (images, digits), test = load()
    # All ranks have the same number of images, in full batches.
    own = slice(hvd.rank(), len(images) // given.batch * given.batch, hvd.size())

    model = network()
    # The same learning rate for all numbers of ranks, because the batch of all ranks is the same.
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    history = model.fit(
        images[own],
        digits[own],
        batch_size=given.batch // hvd.size(),
        epochs=given.epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    _, accuracy = model.evaluate(*test, verbose=0)
    hashes = hvd.allgather_object(fingerprint(model))
    if hvd.rank() == 0:
        for epoch, loss in enumerate(history.history["loss"]):
            print(f"epoch {epoch + 1}: loss {loss:.6f}")
        same = hashes.count(hashes[0])
        print(f"accuracy {accuracy:.3f} of {len(test[0])} images")
        print(f"parameters {hashes[0]}: the same bits on {same} of {hvd.size()} ranks")


if __name__ == "__main__":
    main()
