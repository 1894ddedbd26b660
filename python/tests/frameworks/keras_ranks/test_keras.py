"""``gradwire.keras`` on each backend of Keras."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import gradwire as gw
import gradwire.keras as hvd

BATCH = 12
BACKEND = keras.backend.backend()
needs_tensorflow = pytest.mark.skipif(
    BACKEND != "tensorflow", reason="it is about the backend TensorFlow"
)


def model_of(seed: int = 7) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    )


def data() -> tuple[np.ndarray, np.ndarray]:
    given = np.random.default_rng(3).normal(size=(4 * BATCH * gw.size(), 6)).astype("f4")
    return given, given.sum(1, keepdims=True)


def fit(model: keras.Model, own: bool, **options: Any) -> keras.callbacks.History:
    """Trains with this rank's data, or with all of it in the same batches."""
    given, wanted = data()
    if own:
        given, wanted = given[gw.rank() :: gw.size()], wanted[gw.rank() :: gw.size()]
    batch = BATCH if own else BATCH * gw.size()
    return model.fit(given, wanted, batch_size=batch, shuffle=False, verbose=0, **options)


def same_weights(model: keras.Model, other: keras.Model) -> None:
    for one, two in zip(model.get_weights(), other.get_weights()):
        np.testing.assert_allclose(one, two, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("eagerly", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clipnorm": 0.05},
        {"global_clipnorm": 0.05, "weight_decay": 0.01},
        {"gradient_accumulation_steps": 2, "clipvalue": 0.01},
        {"use_ema": True},
    ],
    ids=str,
)
def test_fit_is_that_of_one_process(options: dict[str, Any], eagerly: bool) -> None:
    alone, ours = model_of(), model_of()
    alone.compile(keras.optimizers.Adam(0.01, **options), "mse", jit_compile=False)
    fit(alone, own=False, epochs=2)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01, **options))
    ours.compile(optimizer, "mse", run_eagerly=eagerly)
    fit(ours, own=True, epochs=2)
    same_weights(ours, alone)


@pytest.mark.parametrize("averaged", [True, False])
def test_backward_passes_per_step(averaged: bool) -> None:
    def trained(optimizer: keras.optimizers.Optimizer, own: bool) -> keras.Model:
        model = model_of()
        model.compile(optimizer, "mse", jit_compile=False)
        fit(model, own)
        return model

    rate = 0.01 if averaged else 0.02
    alone = keras.optimizers.SGD(rate, gradient_accumulation_steps=2)
    ours = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.01),
        backward_passes_per_step=2,
        average_aggregated_gradients=averaged,
    )
    same_weights(trained(ours, True), trained(alone, False))


def test_one_exchange_per_update() -> None:
    model = model_of()
    optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=4)
    model.compile(hvd.DistributedOptimizer(optimizer), "mse")
    before = gw.stats()["operations"]
    fit(model, own=True)  # four batches
    # TensorFlow's gradients form a group.
    each = 1 if BACKEND == "tensorflow" else len(model.trainable_weights)
    assert gw.stats()["operations"] - before == each * (gw.size() > 1)


@needs_tensorflow
def test_xla_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    from keras.src.trainers import trainer  # on CPUs, Keras only asks with jit_compile=True

    model, plain = model_of(), model_of()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD())
    model.compile(optimizer, "mse")
    plain.compile(keras.optimizers.SGD(), "mse", jit_compile=True)
    assert not model.jit_compile and plain.jit_compile
    with caplog.at_level(logging.INFO, "gradwire.keras"):
        assert not trainer.model_supports_jit(model)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    with pytest.raises(gw.InvalidRequest, match="jit_compile=False"):
        model.compile(optimizer, "mse", jit_compile=True)


def test_loss_scaling_is_refused() -> None:
    with pytest.raises(gw.InvalidRequest, match="mixed_bfloat16"):
        hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    with pytest.raises(gw.InvalidRequest, match="mixed_bfloat16"):
        keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD()))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(loss_scale_factor=8.0))
    assert optimizer.loss_scale_factor == 8.0 and optimizer.scale_loss(2.0) == 16.0


def test_saved_models_need_no_gradwire(tmp_path: Path) -> None:
    model = model_of()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.02, clipnorm=1.0))
    assert type(optimizer).__name__ == "Adam" and isinstance(optimizer, keras.optimizers.Adam)
    model.compile(optimizer, "mse")
    fit(model, own=True)
    path = tmp_path / "model.keras"
    model.save(path)
    program = f"""
import sys
import keras
model = keras.models.load_model({str(path)!r})
assert isinstance(model.optimizer, keras.optimizers.Adam), type(model.optimizer)
assert "gradwire" not in sys.modules
print(int(model.optimizer.iterations), float(model.optimizer.clipnorm))
"""
    said = subprocess.run(
        [sys.executable, "-c", program], check=True, text=True, capture_output=True, timeout=200
    )
    assert said.stdout.split() == ["4", "1.0"]
    again = hvd.load_model(path)
    for one, two in zip(again.optimizer.variables, model.optimizer.variables):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))
    fit(again, own=True)
    fit(model, own=True)
    same_weights(again, model)


def test_custom_optimizers_are_saved(tmp_path: Path) -> None:
    @keras.saving.register_keras_serializable("ours")
    class Slow(keras.optimizers.SGD):
        pass

    model = model_of()
    model.compile(hvd.DistributedOptimizer(Slow(0.01)), "mse")
    model.save(tmp_path / "model.keras")
    assert type(keras.models.load_model(tmp_path / "model.keras").optimizer) is Slow
    again = hvd.load_model(tmp_path / "model.keras", custom_optimizers=[Slow])
    assert isinstance(again.optimizer, Slow)


def test_the_broadcast_callback() -> None:
    model, root = model_of(gw.rank()), model_of(gw.size() - 1)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)), "mse")
    root.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", jit_compile=False)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(gw.size() - 1)
    fit(model, own=True, callbacks=[callback])
    fit(root, own=False)
    assert callback.broadcast_done
    same_weights(model, root)
    # A model that has no weights yet gets them after its first step.
    late = keras.Sequential([keras.layers.Dense(1)])
    late.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    fit(late, own=True, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    for weight in late.get_weights():
        assert (gw.allgather(weight[None]) == weight).all()


def test_metrics_are_averaged() -> None:
    logs = {"loss": float(gw.rank()), "accuracy": 1.0}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {"loss": (gw.size() - 1) / 2, "accuracy": 1.0}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, {})


def test_warmup_and_schedule() -> None:
    model, size, rates = model_of(), gw.size(), []
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            rates.append(float(self.model.optimizer.learning_rate))

    warmup = hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2, verbose=1)
    decay = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5**epoch, start_epoch=2)
    history = fit(model, own=True, epochs=4, callbacks=[warmup, decay, Note()])
    expected = [0.1 / size * ((at + 1) / 4 * (size - 1) / 2 + 1) for at in range(8)]
    expected += [0.025] * 4 + [0.0125] * 4
    np.testing.assert_allclose(rates, expected, rtol=1e-5)
    assert history.history["lr"][-1] == pytest.approx(0.0125)


def test_momentum_is_corrected() -> None:
    """The velocity has the old rate in it; it is scaled as Goyal et al. have it."""
    model = model_of()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    fit(model, own=True)
    before = [np.asarray(each) for each in model.optimizer.momentums]
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5)
    callback.set_model(model)
    callback.on_train_batch_begin(0)
    for one, two in zip(model.optimizer.momentums, before):
        np.testing.assert_allclose(np.asarray(one), two / 2, rtol=1e-6)


def test_the_best_model_is_saved_once(tmp_path: Path) -> None:
    folder = gw.broadcast_object(str(tmp_path), 0)
    model = model_of()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    best = hvd.callbacks.BestModelCheckpoint(f"{folder}/best.keras", monitor="loss")
    own = hvd.callbacks.BestModelCheckpoint(f"{tmp_path}/own.keras", monitor="loss")
    fit(model, own=True, callbacks=[hvd.callbacks.MetricAverageCallback(), best, own])
    gw.barrier()
    assert Path(folder, "best.keras").exists()
    assert Path(tmp_path, "own.keras").exists() == (gw.rank() == 0)


def test_local_layers_keep_their_gradients() -> None:
    model = model_of()
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.01), local_layers=model.layers[-1], scale_local_gradients=False
    )
    model.compile(optimizer, "mse")
    fit(model, own=True)
    shared, local = model.layers[0].kernel.numpy(), model.layers[-1].kernel.numpy()
    assert (gw.allgather(shared[None]) == shared).all()
    assert gw.size() == 1 or not (gw.allgather(local[None]) == local).all()


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("built", [False, True])
def test_local_variables(inner: bool, built: bool) -> None:
    if inner and BACKEND == "jax":
        pytest.skip("JAX has no variables")
    model = model_of()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    if built:
        optimizer.build(model.trainable_variables)
    local = model.layers[-1].kernel
    optimizer.register_local_var(local.value if inner else local)
    model.compile(optimizer, "mse")
    fit(model, own=True)
    shared, own = (keras.ops.convert_to_numpy(each.kernel) for each in model.layers)
    assert (gw.allgather(shared[None]) == shared).all()
    assert gw.size() == 1 or not (gw.allgather(own[None]) == own).all()


def test_variables_of_others_are_refused() -> None:
    model = model_of()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    for wrong in ([model.layers[0].kernel], "kernel", np.ones(3)):
        with pytest.raises(gw.InvalidRequest, match=f"this is a {type(wrong).__name__}"):
            optimizer.register_local_var(wrong)
    other = keras.Variable(np.ones(3), name="other")
    optimizer.register_local_var(other)
    with pytest.raises(gw.InvalidRequest, match=r"variable other .* the 4 variables"):
        optimizer.build(model.trainable_variables)
    with pytest.raises(gw.InvalidRequest, match=r"variable other .* the 4 variables"):
        optimizer.register_local_var(other)


@needs_tensorflow
@pytest.mark.parametrize("eagerly", [True, False])
def test_errors_in_layers_are_ours(eagerly: bool, several_ranks: None) -> None:
    import tensorflow as tf

    import gradwire.tensorflow

    class Layer(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return gradwire.tensorflow.allreduce(inputs[: 1 + gw.rank()], name="layer")

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3), Layer()])
    model.compile(keras.optimizers.SGD(), "mse", run_eagerly=eagerly)
    given = np.ones((8, 3), "f4")
    step = lambda x: model.train_on_batch(x, x[: 1 + gw.rank()])  # noqa: E731
    for call in (model, model.predict_on_batch, step):
        with pytest.raises(hvd.HorovodInternalError) as caught:
            call(given)
        error: Any = caught.value
        assert (error.kind, error.tensor) == ("disagreement", "allreduce.layer")
        assert isinstance(error, gw.Disagreement) and isinstance(error, tf.errors.OpError)


def test_the_error_of_a_fit(several_ranks: None) -> None:
    width = 2 + gw.rank()
    model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    with pytest.raises(Exception, match="the ranks disagree") as caught:
        model.fit(np.ones((2, width)), np.ones((2, 1)), verbose=0)
    error = hvd.last_error() if BACKEND == "jax" else caught.value
    assert isinstance(error, gw.Disagreement)
    assert BACKEND == "jax" or hvd.last_error() is None


@needs_tensorflow
def test_errors_can_be_made_again() -> None:
    """As programs do with errors of TensorFlow, to add to their text."""
    import tensorflow as tf

    import gradwire.tensorflow

    with pytest.raises(gw.InvalidRequest) as caught:
        gradwire.tensorflow.broadcast(tf.ones([2]), root_rank=gw.size())
    old: Any = caught.value
    old.rank, old.host = 3, "far"
    try:
        raise old
    except tf.errors.OpError as error:
        new: Any = type(error)(error.node_def, error.op, f"more: {error.message}", error.error_code)
    assert (new.kind, new.rank, new.host, new.recoverable) == ("invalid", 3, "far", False)
    assert str(new) == new.message == f"more: {old}" and new.error_code == old.error_code
    assert new._failure is old._failure


def test_arguments_of_optimizers() -> None:
    with pytest.raises(gw.InvalidRequest, match="not an optimizer of Keras 3"):
        hvd.DistributedOptimizer("sgd")
    with pytest.raises(gw.InvalidRequest, match="backward_passes_per_step=0"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=0)
    own = hvd.Compression.bf16
    assert own == "bf16" if BACKEND == "jax" else own.__name__ == "BF16Compressor"


def test_ranks_with_fewer_batches_join() -> None:
    """The last step of the first rank alone has its own gradient."""
    counts = [4 - rank % 3 for rank in range(gw.size())]
    given = [
        np.random.default_rng(9 + rank).normal(size=(2 * n, 6)) for rank, n in enumerate(counts)
    ]
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), "mse")
    own = given[gw.rank()].astype("f4")
    callbacks = [hvd.callbacks.JoinCallback(), hvd.callbacks.MetricAverageCallback()]
    options: Any = {"batch_size": 2, "shuffle": False, "verbose": 0, "callbacks": callbacks}
    model.fit(own, own.sum(1, keepdims=True) * 2, epochs=3, **options)

    weights, velocity = np.ones(7) * [1, 1, 1, 1, 1, 1, 0], np.zeros(7)
    for step in list(range(4)) * 3:
        gradients = []
        for data, batches in zip(given, counts):
            if step < batches:
                rows = np.c_[data[2 * step : 2 * step + 2], np.ones(2)]
                error = rows @ weights - 2 * rows[:, :6].sum(1)
                gradients.append(rows.T @ error)  # the mean of two squares
        velocity = 0.9 * velocity - 0.05 * np.mean(gradients, 0)
        weights = weights + velocity
    found = np.concatenate([keras.ops.convert_to_numpy(each).ravel() for each in model.weights])
    np.testing.assert_allclose(found, weights, rtol=1e-4, atol=1e-5)
    assert int(model.optimizer.iterations) == 12


def test_elastic_states_need_what_they_save() -> None:
    with pytest.raises(gw.InvalidRequest, match="model is a int, not a model of Keras 3"):
        hvd.elastic.KerasState(3)  # type: ignore[arg-type]
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(gw.InvalidRequest, match=r"call model.build\(input_shape\)"):
        hvd.elastic.KerasState(unbuilt)
    state = hvd.elastic.ObjectState(batch=0)
    with pytest.raises(gw.InvalidRequest, match="batches_per_commit=0: it must be a whole"):
        hvd.elastic.CommitStateCallback(state, 0)
    with pytest.raises(gw.InvalidRequest, match="no attribute epoch: make it with KerasState"):
        hvd.elastic.UpdateEpochStateCallback(state)
    with pytest.raises(gw.InvalidRequest, match="first argument is a int, not a State"):
        hvd.elastic.run(lambda _: None)(3)  # type: ignore[arg-type]
    with pytest.raises(gw.InvalidRequest, match="func is a int, not a function"):
        hvd.elastic.run(3)  # type: ignore[arg-type]


def test_states_of_other_models_are_an_error(several_ranks: None) -> None:
    model = keras.Sequential(
        [keras.Input((2 + gw.rank() // (gw.size() - 1),)), keras.layers.Dense(1)]
    )
    with pytest.raises(gw.InvalidRequest, match=r"variable 0 with shape .*make the same model"):
        hvd.elastic.run(lambda state: None)(hvd.elastic.KerasState(model))


def test_a_state_returns_to_its_commit() -> None:
    model = model_of(gw.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse")
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    @hvd.elastic.run
    def train(state: Any) -> list[Any]:
        weights = [keras.ops.convert_to_numpy(each) for each in model.weights]
        fit(model, own=True, callbacks=[hvd.elastic.UpdateBatchStateCallback(state)], epochs=2)
        return weights

    before = train(state)
    own = np.concatenate([each.ravel() for each in before])
    assert np.array_equal(own, gw.broadcast(own, 0)), "that of rank 0"
    assert int(model.optimizer.iterations) == 8 and state.batch == 0
    state.restore()
    assert int(model.optimizer.iterations) == 0
    for variable, expected in zip(model.weights, before):
        assert np.array_equal(keras.ops.convert_to_numpy(variable), expected)
    state.batch = 3
    fit(model, own=True, callbacks=[hvd.elastic.UpdateBatchStateCallback(state)], epochs=2)
    assert int(model.optimizer.iterations) == 1 + 4, "the first epoch had 3 of 4 batches"
