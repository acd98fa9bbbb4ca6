"""TensorFlow Serving's REST interface: JSON to the arguments of a signature, and its results to JSON.

    {"signature_name": "score_text", "inputs": {"text": ["a", "b"]}}       columns -> {"outputs": ...}
    {"signature_name": "score_text", "instances": [{"text": "a"}]}         rows -> {"predictions": [...]}

For a signature with one input, a request may leave out the name of the input. The name of an only output is always left
out. Binary strings are written {"b64": "..."}, and so are the strings of outputs whose names end with "_bytes".
"""

from __future__ import annotations

import base64
import binascii
import functools
from typing import Any

import numpy as np

from txl_config.errors import brief
from txl_programs.server.errors import Failed
from txl_tf.serving.batcher import required_arguments

# A float32 output of up to this many numbers is written with as few digits as float32 needs. More would take too long.
MOST_EXACT = 100_000
# Type of a tensor -> its name in TensorFlow Serving's metadata.
DTYPES = {
    "string": "DT_STRING", "bool": "DT_BOOL", "int32": "DT_INT32", "int64": "DT_INT64", "float32": "DT_FLOAT",
    "float64": "DT_DOUBLE",
}  # fmt: skip


class Signature:
    """One signature of a model.

    Args:
        name: name of the signature.
        function: its function in `StoredModel.signatures()`.
    """

    def __init__(self, name: str, function: Any):
        self.name = name
        self.function = function
        self.inputs = {spec.name: spec for spec in function.input_signature}
        self.required = required_arguments(function)

    @functools.cached_property
    def outputs(self) -> dict[str, Any]:
        """`{name: TensorSpec}` of the results. The first use traces the graph."""
        return self.function.get_concrete_function().structured_outputs

    def arguments(self, request: dict[str, Any]) -> dict[str, np.ndarray]:
        """Returns the inputs of a request as `{name: array}`. Raises Failed with status 400 if the request is wrong."""
        if ("inputs" in request) == ("instances" in request):
            raise Failed(400, 'a request must have "inputs" (columns) or "instances" (rows), and not both')
        values = self._columns(request["inputs"]) if "inputs" in request else self._rows(request["instances"])
        for key in values:
            if key not in self.inputs:
                known = ", ".join(self.inputs)
                raise Failed(400, f"signature {self.name} has no input {brief(key)}: its inputs are {known}")
        for key in self.required:
            if key not in values:
                raise Failed(400, f"signature {self.name} needs the input {key}")
        return {key: array_of(key, value, self.inputs[key].dtype.name) for key, value in values.items()}

    def _columns(self, inputs: Any) -> dict[str, Any]:
        """Returns "inputs" as `{name: value}`. Raises Failed if the name is left out, and there are several inputs."""
        if isinstance(inputs, dict) and "b64" not in inputs:
            return inputs
        return {self._only("inputs"): inputs}

    def _rows(self, instances: Any) -> dict[str, list]:
        """Returns "instances", a list of rows, as `{name: values of all rows}`.

        Raises Failed if there are no rows, if they have different names, or if they lack names and there are several
        inputs.
        """
        if not isinstance(instances, list) or not instances:
            raise Failed(400, f'"instances" must be a list with at least one row, got {brief(instances)}')
        if not isinstance(instances[0], dict) or "b64" in instances[0]:
            return {self._only("instances"): instances}
        names = instances[0].keys()
        for i, row in enumerate(instances):
            if not isinstance(row, dict) or row.keys() != names:
                raise Failed(
                    400, f'every row of "instances" must have the names {", ".join(names)}: row {i} has others'
                )
        return {name: [row[name] for row in instances] for name in names}

    def _only(self, where: str) -> str:
        """Returns the name of the only input. Raises Failed if there are several.

        Args:
            where: "inputs" or "instances", for the message.
        """
        if len(self.inputs) != 1:
            known = ", ".join(self.inputs)
            raise Failed(400, f'"{where}" must name the inputs of signature {self.name}, which has several: {known}')
        return next(iter(self.inputs))

    def answer(self, request: dict[str, Any], results: dict[str, np.ndarray]) -> dict[str, Any]:
        """Returns the results of a request as JSON values, in columns or rows like its inputs.

        Args:
            request: the JSON object of the request.
            results: `{name: array}`.
        """
        columns = {name: values_of(name, array) for name, array in results.items()}
        if "inputs" in request:
            return {"outputs": columns if len(columns) > 1 else next(iter(columns.values()))}
        if len(columns) == 1:
            return {"predictions": next(iter(columns.values()))}
        rows = zip(*columns.values(), strict=True)
        return {"predictions": [dict(zip(columns, row, strict=True)) for row in rows]}

    def described(self) -> dict[str, Any]:
        """Returns the signature in the form of TensorFlow Serving's metadata."""
        inputs = {name: _described(name, spec) for name, spec in self.inputs.items()}
        outputs = {name: _described(name, spec) for name, spec in self.outputs.items()}
        return {"inputs": inputs, "outputs": outputs, "method_name": "tensorflow/serving/predict"}


def array_of(name: str, value: Any, dtype: str) -> np.ndarray:
    """Returns a JSON value as an array of the type `dtype`; strings become bytes in an array of objects.

    Raises Failed with status 400, with `name` in the message, if the value has rows of different lengths, another type,
    or an integer of more than 32 bits.
    """
    value = _without_b64(name, value)
    if dtype == "string":
        array = np.array(value, object)
        others = [x for x in array.ravel() if not isinstance(x, (str, bytes))]
        if others:
            raise Failed(400, f"{name} must be strings in rows of equal length, got {brief(others[0])}")
        strings = np.empty([array.size], object)
        strings[:] = [x.encode("utf-8", "surrogatepass") if isinstance(x, str) else x for x in array.ravel()]
        return strings.reshape(array.shape)
    wanted = "integers" if dtype.startswith("int") else "numbers"
    try:
        array = np.array(value)
    except (ValueError, OverflowError):  # ragged rows, or an integer that is too large
        array = np.array("", object)  # this dtype is refused below
    if not array.size and array.dtype.kind == "f":  # [] has the dtype float64
        return array.astype(dtype)
    kinds = "iu" if wanted == "integers" else "iuf"
    if array.dtype.kind not in kinds or _has_bool(value):
        raise Failed(400, f"{name} must be {wanted} in rows of equal length, got {brief(value)}")
    if wanted == "integers" and array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise Failed(400, f"{name} must be integers of 32 bits, got {brief(value)}")
    return array.astype(dtype)


def _has_bool(value: Any) -> bool:
    """Whether a JSON value is true or false, or a list that contains one at any depth: NumPy takes it as 1 or 0."""
    if not isinstance(value, list):
        return isinstance(value, bool)
    types = set(map(type, value))
    return bool in types or (list in types and any(map(_has_bool, value)))


def _without_b64(name: str, value: Any) -> Any:
    """Returns a JSON value with bytes in place of each {"b64": ...}. Raises Failed for an object that is not base64."""
    if isinstance(value, list):
        has_others = any(isinstance(x, (list, dict)) for x in value)
        return [_without_b64(name, x) for x in value] if has_others else value
    if not isinstance(value, dict):
        return value
    try:
        if value.keys() != {"b64"}:
            raise ValueError(value)
        return base64.b64decode(value["b64"], validate=True)
    except (ValueError, TypeError, binascii.Error):
        raise Failed(400, f'{name} must have binary strings as {{"b64": BASE64}}, got {brief(value)}') from None


def values_of(name: str, array: np.ndarray) -> Any:
    """Returns an array as a JSON value. Bytes become {"b64": ...} if the name ends with "_bytes", else text.

    Up to `MOST_EXACT` numbers of the type float32 get as few digits as possible.
    """
    if array.dtype == object:
        convert = _as_b64 if name.endswith("_bytes") else _as_text
        flat = np.empty([array.size], object)
        flat[:] = [convert(data) for data in array.ravel()]
        return flat.reshape(array.shape).tolist()
    if array.dtype == np.float32 and array.size <= MOST_EXACT:
        return array.astype(str).astype(np.float64).tolist()  # 0.1 instead of 0.10000000149011612
    return array.tolist()


def _as_b64(data: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(data).decode()}


def _as_text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _described(name: str, spec: Any) -> dict[str, Any]:
    """Returns an input or output in the form of TensorFlow Serving's metadata."""
    rank = spec.shape.rank
    dims = [{"size": str(-1 if size is None else size), "name": ""} for size in spec.shape] if rank is not None else []
    shape = {"dim": dims, "unknown_rank": rank is None}
    return {"dtype": DTYPES[spec.dtype.name], "tensor_shape": shape, "name": f"{name}:0"}
