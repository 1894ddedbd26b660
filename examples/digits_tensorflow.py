"""Handwritten digits with a Horovod script for TensorFlow 2, of which only the import was changed.

    gradwire run -np 4 -- python examples/digits_tensorflow.py

Every rank trains on its share of each batch, so the result is the same as with one process.
"""

import keras
import tensorflow as tf

import gradwire.tensorflow as hvd  # was: import horovod.tensorflow as hvd
from digits_arguments import TEST_IMAGES, arguments
from digits_arrays import fingerprint, load, network


def main() -> None:
    given = arguments(__doc__).parse_args()

    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    train, (images, digits) = load()
    steps = len(train[0]) // given.batch
    data = tf.data.Dataset.from_tensor_slices(train).shuffle(2000, seed=1)
    data = data.shard(hvd.size(), hvd.rank())
    data = data.batch(given.batch // hvd.size(), drop_remainder=True).take(steps)

    model = network()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)

    @tf.function
    def training_step(images: tf.Tensor, digits: tf.Tensor, first_batch: bool) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(digits, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        # After the first step, because it creates the variables of the optimizer.
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return loss

    for epoch in range(given.epochs):
        total = tf.zeros(())
        for step, batch in enumerate(data):
            total += training_step(*batch, epoch == step == 0)
        mean = hvd.allreduce(total / steps, name="loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {mean:.6f}", flush=True)

    images, digits = images[hvd.rank() :: hvd.size()], digits[hvd.rank() :: hvd.size()]
    right = tf.reduce_sum(tf.cast(tf.argmax(model(images), 1) == digits, tf.int32))
    right = hvd.allreduce(right, op=hvd.Sum, name="right")
    hashes = hvd.allgather_object(fingerprint(model))
    if hvd.rank() == 0:
        same = hashes.count(hashes[0])
        print(f"accuracy {right / TEST_IMAGES:.3f} of {TEST_IMAGES} images")
        print(f"parameters {hashes[0]}: the same bits on {same} of {hvd.size()} ranks")


if __name__ == "__main__":
    main()
