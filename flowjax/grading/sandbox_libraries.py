"""Objects of numpy, scipy, pandas and torch as data that crosses from box to box.

An object that is data is taken apart into a name and parts, which are data themselves; on the other side the library's
own constructors put it together again. Nothing is unpickled, since unpickling runs code. This source runs inside the
boxes, where `flowjax.grading.sandbox_runner` loads it under its module name.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# (a value here may be of any type)

import ast
import sys

_SPARSE = ("bsr", "coo", "csc", "csr", "dia", "dok", "lil")
_INDEXES = ("Index", "DatetimeIndex", "TimedeltaIndex", "PeriodIndex", "IntervalIndex", "CategoricalIndex")
_WITH_FREQUENCY = ("DatetimeIndex", "TimedeltaIndex")
_MASKED = ("IntegerArray", "FloatingArray", "BooleanArray")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, range)
_VALUE_MODULES = ("decimal", "fractions", "datetime", "uuid", "pathlib")
_FACTORIES = (None, int, float, str, tuple, list, dict, set)  # of a defaultdict
_MOST_PARTS = 1_000_000


def parts_of(value):
    """A name for the kind of a library's object, and its parts; None for an object that is no data.

    Classes are compared by `is`: one that a program derives could claim to be anything.
    """
    library = type(value).__module__.partition(".")[0]
    if library not in LIBRARIES or library not in sys.modules:
        return None
    return LIBRARIES[library][0](value, type(value))


def from_parts(name, parts):
    """The object that `parts_of` took apart.

    Raises:
        ValueError: a part is no data, or the library refuses the parts. Libraries raise other errors, too.
    """
    library = name.partition(".")[0]
    if library not in LIBRARIES:
        raise ValueError(f"{name} is of no library whose objects are data")
    # A constructor asks its arguments what they are, and a mirror may answer that it is a column. Only an array of
    # objects may have other objects as parts: `check_data` looks into these.
    if name != "numpy.objects" and not all(map(is_part, parts)):
        raise ValueError(f"a part of {name} is no data")
    return LIBRARIES[library][1](name, parts)


def is_part(value):
    """True for a value that is no object of the other side: its class, or in a tuple those of all parts, are data's."""
    kind = type(value)
    if kind is tuple:
        return all(map(is_part, value))
    return kind in _PLAIN or kind.__module__.partition(".")[0] in (*_VALUE_MODULES, *LIBRARIES)


def check_data(value):
    """Refuse a value that is not data in all of its parts: an object among them could answer as it likes.

    Raises:
        TypeError: a part is no data, or there are too many.
    """
    parts = [value]
    for part in parts:
        kind = type(part)
        module = kind.__module__.split(".")[0]
        if kind in (list, tuple, set, frozenset) or (module == "collections" and kind.__name__ == "deque"):
            parts += part
        elif issubclass(kind, dict) and module in ("builtins", "collections"):
            if getattr(part, "default_factory", None) not in _FACTORIES:
                raise TypeError("the result holds a defaultdict with a function of its own")
            parts += [*dict.keys(part), *dict.values(part)]
        elif (named := parts_of(part)) is not None:
            parts += named[1]
        elif kind not in _PLAIN and module not in _VALUE_MODULES:
            raise TypeError(f"the result is or holds no data, but an object of class {kind.__name__}")
        if len(parts) > _MOST_PARTS:
            raise TypeError(f"the result has more than {_MOST_PARTS} parts")


# numpy and scipy


def _numpy_parts(value, kind):
    numpy = sys.modules["numpy"]
    if kind is numpy.ndarray and value.dtype == object:
        return "numpy.objects", (value.shape, *value.ravel())
    if kind is numpy.matrix and not value.dtype.hasobject:
        return "numpy.matrix", (numpy.asarray(value),)
    if isinstance(value, numpy.dtype):
        return "numpy.dtype", (repr(numpy.lib.format.dtype_to_descr(value)),)
    if kind is not numpy.ndarray and not (isinstance(value, numpy.generic) and kind.__module__ == "numpy"):
        return None
    try:
        dtype = repr(numpy.lib.format.dtype_to_descr(value.dtype))
    except ValueError:  # a structured type whose fields overlap or are out of order
        return None
    if value.dtype.hasobject:
        return None
    if kind is numpy.ndarray:
        return "numpy.array", (dtype, value.shape, value.tobytes())
    return "numpy.scalar", (dtype, value.tobytes())


def _from_numpy_parts(name, parts):
    import numpy

    if name == "numpy.objects":
        shape, *values = parts
        array = numpy.empty(len(values), object)
        for number, value in enumerate(values):
            array[number] = value
        return array.reshape(shape)
    if name == "numpy.matrix":
        return numpy.asmatrix(*parts)
    dtype = numpy.lib.format.descr_to_dtype(ast.literal_eval(parts[0]))
    if name == "numpy.dtype":
        return dtype
    if dtype.hasobject:
        raise ValueError("objects are no data")
    shape = (1,) if name == "numpy.scalar" else parts[1]
    empty = not dtype.itemsize  # a type of texts without a character, which `frombuffer` refuses
    array = numpy.zeros(shape, dtype) if empty else numpy.frombuffer(parts[-1], dtype).copy().reshape(shape)
    return array[0] if name == "numpy.scalar" else array


def _scipy_parts(value, kind):
    library = sys.modules.get("scipy.sparse")
    if kind.__name__[:3] not in _SPARSE or getattr(library, kind.__name__, None) is not kind:
        return None
    entries = value.tocoo()
    return "scipy.sparse", (kind.__name__, value.shape, entries.data, *entries.coords)


def _from_scipy_parts(_, parts):
    import numpy
    import scipy.sparse

    kind, shape, values, *places = parts
    if kind[:3] not in _SPARSE or kind[3:] not in ("_array", "_matrix"):
        raise ValueError(f"{kind} is no sparse array")
    if any(type(array) is not numpy.ndarray or array.dtype.hasobject for array in (values, *places)):
        raise ValueError("objects are no data")
    return getattr(scipy.sparse, kind)(scipy.sparse.coo_array((values, tuple(places)), shape=shape))


# pandas


def _pandas_parts(value, kind):
    pandas = sys.modules["pandas"]
    if kind is pandas.DataFrame:
        columns = (_held_by(value.iloc[:, number]) for number in range(value.shape[1]))
        return "pandas.frame", (value.columns, value.index, *columns)
    if kind is pandas.Series:
        return "pandas.series", (_held_by(value), value.index, value.name)
    if kind is pandas.RangeIndex:
        return "pandas.range", (value.start, value.stop, value.step, value.name)
    if kind is pandas.MultiIndex:
        codes = tuple(_copy(codes) for codes in value.codes)
        return "pandas.levels", (tuple(value.levels), codes, tuple(value.names))
    if kind.__name__ in _INDEXES and kind is getattr(pandas, kind.__name__):
        frequency = _frequency_of(value) if kind.__name__ in _WITH_FREQUENCY else None
        return "pandas.index", (kind.__name__, _held_by(value), value.name, frequency)
    if kind is pandas.Timestamp and _has_known_zone(value):
        return "pandas.timestamp", (value.asm8, _zone_of(value))
    if kind is pandas.Timedelta:
        return "pandas.timedelta", (value.asm8,)
    if kind is pandas.Period:
        return "pandas.period", (value.ordinal, value.freqstr)
    if kind is pandas.Interval:
        return "pandas.interval", (value.left, value.right, value.closed)
    if value is pandas.NaT or value is pandas.NA:
        return "pandas.missing", ("NaT" if value is pandas.NaT else "NA",)
    return _column_parts(value, kind)


def _column_parts(value, kind):
    """Parts of an array of a type that numpy lacks."""
    pandas = sys.modules["pandas"]
    if kind is pandas.Categorical:
        return "pandas.categories", (_copy(value.codes), value.categories, bool(value.ordered))
    if kind is pandas.arrays.DatetimeArray and _has_known_zone(value):
        return "pandas.datetimes", (value.asi8.view(f"M8[{value.unit}]"), _zone_of(value))
    if kind is pandas.arrays.TimedeltaArray:
        return "pandas.timedeltas", (value.asi8.view(f"m8[{value.unit}]"),)
    if kind is pandas.arrays.PeriodArray:
        return "pandas.periods", (_copy(value.asi8), value.freqstr)
    if kind is pandas.arrays.IntervalArray:
        return "pandas.intervals", (value.left, value.right, value.closed)
    if kind.__name__ in _MASKED and kind is getattr(pandas.arrays, kind.__name__):
        values = value.to_numpy(value.dtype.numpy_dtype, na_value=0)
        return "pandas.masked", (kind.__name__, values, _copy(value.isna()))
    if kind in (pandas.arrays.StringArray, pandas.arrays.ArrowStringArray):
        missing_is_na = getattr(value.dtype, "na_value", pandas.NA) is pandas.NA
        return "pandas.strings", (value.to_numpy(object), value.dtype.storage, missing_is_na)
    return None


def _from_pandas_parts(name, parts):
    import pandas

    match name.removeprefix("pandas."), parts:
        case "frame", [columns, index, *arrays]:
            series = {number: _series(array, index, None) for number, array in enumerate(arrays)}
            frame = pandas.DataFrame(series, index=index)
            frame.columns = columns
            return frame
        case "series", [array, index, called]:
            return _series(array, index, called)
        case "range", [start, stop, step, called]:
            return pandas.RangeIndex(start, stop, step, name=called)
        case "levels", [levels, codes, names]:
            return pandas.MultiIndex(levels=levels, codes=codes, names=names)
        case "index", [kind, array, called, frequency] if kind in _INDEXES:
            index = getattr(pandas, kind)(array, name=called, **({"dtype": array.dtype} if kind == "Index" else {}))
            if frequency is not None:
                index.freq = frequency
            return index
        case "timestamp", [moment, zone]:
            return _in_zone(pandas.Timestamp(moment), zone)
        case "timedelta", [span]:
            return pandas.Timedelta(span)
        case "period", [ordinal, frequency]:
            return pandas.Period(ordinal=ordinal, freq=frequency)
        case "interval", [left, right, closed]:
            return pandas.Interval(left, right, closed)
        case "missing", [which]:
            return pandas.NaT if which == "NaT" else pandas.NA
    return _from_column_parts(name, parts)


def _from_column_parts(name, parts):
    import pandas

    match name.removeprefix("pandas."), parts:
        case "categories", [codes, categories, ordered]:
            return pandas.Categorical.from_codes(codes, categories, ordered=ordered)
        case "datetimes", [moments, zone]:
            return _in_zone(pandas.DatetimeIndex(moments), zone).array
        case "timedeltas", [spans]:
            return pandas.TimedeltaIndex(spans).array
        case "periods", [ordinals, frequency]:
            return pandas.arrays.PeriodArray(ordinals, dtype=pandas.PeriodDtype(frequency))
        case "intervals", [left, right, closed]:
            return pandas.arrays.IntervalArray.from_arrays(left, right, closed=closed)
        case "masked", [kind, values, mask] if kind in _MASKED:
            return getattr(pandas.arrays, kind)(values, mask)
        case "strings", [values, storage, missing_is_na]:
            missing = {} if missing_is_na else {"na_value": float("nan")}
            return pandas.array(values, dtype=pandas.StringDtype(storage, **missing))
    raise ValueError(f"{name} is no data of pandas")


def _series(array, index, name):
    """A column that keeps its dtype, which pandas would guess from a list."""
    import pandas

    return pandas.Series(array, index=index, dtype=array.dtype, name=name)


def _held_by(values):
    """The array of a series or an index: numpy's where it is one, else one of pandas."""
    array = values.array
    return array.to_numpy() if type(array).__name__ == "NumpyExtensionArray" else array


def _copy(array):
    return sys.modules["numpy"].array(array)


def _frequency_of(index):
    """Name of an index's frequency; None where it has none, or where the name does not give all of it back."""
    pandas = sys.modules["pandas"]
    try:
        return index.freqstr if pandas.tseries.frequencies.to_offset(index.freqstr) == index.freq else None
    except ValueError:
        return None


def _zone_of(moments):
    """Name of the time zone, or the zone itself where it is data: a fixed offset, or None."""
    import datetime

    zone = moments.tz
    if zone is None or type(zone) is datetime.timezone:
        return zone
    fixed = zone.utcoffset(None)
    return str(zone) if fixed is None or str(zone) == "UTC" else datetime.timezone(fixed)


def _has_known_zone(moments):
    """True where there is no time zone, or pandas finds it by its name."""
    zone = _zone_of(moments)
    if not isinstance(zone, str):
        return True
    try:
        return sys.modules["pandas"].Timestamp(0, tz=zone).tz == moments.tz
    except (KeyError, ValueError):
        return False


def _in_zone(moments, zone):
    return moments if zone is None else moments.tz_localize("UTC").tz_convert(zone)


# torch


def _torch_parts(value, kind):
    torch = sys.modules["torch"]
    if kind is not torch.Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
        return None
    if value.requires_grad:  # it belongs to an autograd graph, which cannot be sent
        return None
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    try:
        return "torch.tensor", (plain.numpy(),)
    except TypeError:  # numpy lacks its dtype (bfloat16)
        return None


def _from_torch_parts(_, parts):
    import torch

    return torch.from_numpy(*parts)


LIBRARIES = {
    "numpy": (_numpy_parts, _from_numpy_parts),
    "scipy": (_scipy_parts, _from_scipy_parts),
    "pandas": (_pandas_parts, _from_pandas_parts),
    "torch": (_torch_parts, _from_torch_parts),
}
