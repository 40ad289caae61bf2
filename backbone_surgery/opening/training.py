"""Training: which variables of an edited model learn, decided without touching shared layers."""

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

from keras import ops

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError
from backbone_surgery.opening.once import lora_settings, made_once

_OF_HOSTS = (
    "The batch size of the input dataset is unknown",
    "When using a multi-worker distribution",
    "Global batch size must be divisible",
    "Fetching value for `jax.Array` that spans non-addressable",
)
"""How errors of Keras and JAX begin where several processes hold a mesh."""


class TrainsOwnLayers:
    """A Keras model of which only some layers train, where it names any.

    Layers are shared with the backbone and with every other graph made of it, so freezing them by
    `layer.trainable = False` would freeze them everywhere. Instead the model itself answers what
    is trainable, which is all that `fit` and the optimizers ask.
    """

    trained_layers: tuple = ()

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream; refuses a rewrite that acts on no token, and weights that Adam moves not."""
        _check_optimizer(self)
        given = args[0] if args else kwargs.get("x")
        names = given if isinstance(given, dict) else ()
        for rewrite in getattr(getattr(self, "opened", self), "rewrites", ()):
            check = getattr(rewrite, "check_fit", None)
            if check is not None and f"{rewrite.name}_tokens" not in names:
                check()
        with _keeping_values(self, "fit"):
            return super().fit(*args, **kwargs)  # type: ignore[misc]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream."""
        with _keeping_values(self, "evaluate"):
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream."""
        with _keeping_values(self, "predict"):
            return super().predict(*args, **kwargs)  # type: ignore[misc]

    def make_train_function(self, force: bool = False) -> Any:
        """As upstream; made anew where LoRA was set to something else since."""
        renewed = self._renew("train")
        return super().make_train_function(force or renewed)  # type: ignore[misc]

    def make_test_function(self, force: bool = False) -> Any:
        """As `make_train_function`."""
        renewed = self._renew("test")
        return super().make_test_function(force or renewed)  # type: ignore[misc]

    def make_predict_function(self, force: bool = False) -> Any:
        """As `make_train_function`."""
        renewed = self._renew("predict")
        return super().make_predict_function(force or renewed)  # type: ignore[misc]

    @property
    def trainable_variables(self) -> list[Any]:
        """The variables that `fit` changes: those of `trained_layers`, or all, as upstream."""
        return self._split(super().trainable_variables, super().non_trainable_variables)[0]  # type: ignore[misc]

    @property
    def non_trainable_variables(self) -> list[Any]:
        """All other variables."""
        return self._split(super().trainable_variables, super().non_trainable_variables)[1]  # type: ignore[misc]

    @property
    def trainable_weights(self) -> list[Any]:
        """As `trainable_variables`, in the older words of Keras."""
        return self._split(super().trainable_weights, super().non_trainable_weights)[0]  # type: ignore[misc]

    @property
    def non_trainable_weights(self) -> list[Any]:
        """As `non_trainable_variables`, without the states of seeds and metrics."""
        return self._split(super().trainable_weights, super().non_trainable_weights)[1]  # type: ignore[misc]

    def _renew(self, kind: str) -> bool:
        """Tell whether a function that Keras keeps was made under other settings of LoRA.

        If so, its step becomes a new callable: JAX goes by that, as long as somebody keeps the old
        function, such as the traceback of an error.
        """
        made_under, settings = made_once(self, "made under", dict), lora_settings(self)
        before = made_under.get(kind, settings)
        made_under[kind] = settings
        is_old = before != settings
        if is_old and kind != "predict":  # of that Keras makes a new one itself
            step = f"{kind}_step"
            object.__setattr__(self, step, functools.partial(getattr(type(self), step), self))
        return is_old

    def _split(self, trainable: list[Any], others: list[Any]) -> tuple[list[Any], list[Any]]:
        own = {id(v) for layer in self.trained_layers for v in layer.trainable_variables}
        if not own:
            return trainable, others
        frozen = [v for v in trainable if id(v) not in own]
        return [v for v in trainable if id(v) in own], [*others, *frozen]


def _check_optimizer(model: Any) -> None:
    """Refuse Adam and its kin where their second decay is 1 in the dtype of all weights.

    They multiply each step by the root of one less a power of it, and so take steps of zero. Where
    others do move, such as those of LoRA, which are in float32, that is a warning.
    """
    decay = getattr(getattr(model, "optimizer", None), "beta_2", None)
    if decay is None:
        return
    variables = model.trainable_variables
    ones = {d for d in {v.dtype for v in variables} if float(ops.cast(float(decay), d)) == 1}
    stuck = [v for v in variables if v.dtype in ones]
    if not stuck:
        return
    words = (
        f"fit of '{model.name}': expected weights that the optimizer can move. Received "
        f"{len(stuck)} of {len(variables)} in {stuck[0].dtype}, such as '{stuck[0].path}': there "
        f"beta_2={decay} is 1, and steps come to nothing. Make new layers in float32, load the "
        "model in 'mixed_bfloat16', or pass a smaller `beta_2`, such as 0.99."
    )
    if len(stuck) == len(variables):
        raise SurgeryError(words)
    warnings.warn(words, stacklevel=3)


@contextlib.contextmanager
def _keeping_values(model: Any, operation: str) -> Iterator[None]:
    """Put values back into variables where what runs inside fails.

    On JAX Keras takes them out of all variables of a model before the first step, to spare memory,
    and each step takes over the arrays of the one before. Where a step fails, as for inputs that do
    not fit, or is interrupted, `predict` and `evaluate` leave the model without weights.
    """
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer else ())]
    values = [graph.array_of(variable) for variable in variables]
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # a step that failed midway took the arrays over
            getattr(model, "jax_state_sync", lambda: None)()
        for variable, value in zip(variables, values, strict=True):
            is_lost = graph.array_of(variable) is None and value is not None
            if is_lost and not value.is_deleted():
                graph.put_array(variable, value)
        words = _in_words(error, operation)
        if words is not None:
            raise SurgeryError(f"{operation} of '{model.name}': {words}") from error
        raise


def _in_words(error: BaseException, operation: str) -> str | None:
    """Return what went wrong in a step of Keras or JAX, where what they say is hard to act on."""
    said = str(error)
    if said.startswith("Argument `optimizer_variables` must be"):
        return (
            "expected an optimizer for the variables that learn now. Received one that began with "
            "others, before `enable_lora`, `quantize` or `trainable` changed which learn. Call "
            "`compile` again."
        )
    if type(error).__name__ == "IndivisibleError":  # of JAX, which does not make it public
        reason = said.rpartition("implies that ")[2][:200]
        return (
            "expected batches, the last one included, whose texts the devices of the mesh can "
            f"share evenly. Received another ({reason}). Choose `batch_size` and the number of "
            "texts so."
        )
    if not said.startswith(_OF_HOSTS):
        return None
    if operation == "predict":
        return (
            "expected one process that holds the whole model. Received one of several on a mesh. "
            "Call the model itself, or `score`."
        )
    return (
        "expected a `tf.data.Dataset` with batches of one size, which processes that hold a mesh "
        "together can share evenly. Received arrays, or other batches. Pass "
        "`tf.data.Dataset.from_tensor_slices((x, y)).batch(size, drop_remainder=True)`."
    )
