"""Data as users have them: what becomes an array, of which type, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from turbanet.core.arrays import as_array, as_arrays

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_a_jax_array_comes_back_untouched():
    x = jnp.asarray(X)
    assert as_array(x, "x") is x


def test_a_traced_array_comes_back_untouched():
    assert jax.jit(lambda x: as_arrays({"x": x}, "x")["x"].sum())(X) == 15


def test_a_numpy_array_of_a_type_that_jax_computes_in_is_not_copied():
    assert as_array(X, "x") is X


def test_a_tensor_is_not_copied():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6.0)
    array = as_array(tensor, "x")
    tensor += 1
    np.testing.assert_array_equal(array, [1, 2, 3, 4, 5, 6])


def test_a_tensor_that_requires_a_gradient_and_lies_across_memory():
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(X).clone().requires_grad_().T
    np.testing.assert_array_equal(as_array(tensor, "x"), X.T)


def test_a_bfloat16_tensor():
    torch = pytest.importorskip("torch")
    array = as_array(torch.from_numpy(X).to(torch.bfloat16), "x")
    assert array.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(array, np.float32), X)


@pytest.mark.parametrize("wide, narrow", [("int64", "int32"), ("uint64", "uint32"), ("float64", "float32")])
def test_wide_types_become_what_jax_computes_in(wide, narrow):
    array = as_array(X.astype(wide), "x")
    assert array.dtype == narrow
    np.testing.assert_array_equal(array, X)


@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_wide_types_stay_with_x64(dtype):
    with jax.enable_x64(True):
        assert as_array(X.astype(dtype), "x").dtype == dtype


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1])
def test_whole_numbers_outside_of_int32_are_refused(number):
    with pytest.raises(ValueError, match=f"y holds whole numbers from .*{number}.*int32"):
        as_array(np.array([0, number]), "y")


def test_floats_beyond_float32_are_refused():
    with pytest.raises(ValueError, match=r"x holds numbers up to 1e\+39, JAX computes in float32: scale them"):
        as_array(np.array([np.inf, -1e39, 1]), "x")
    np.testing.assert_array_equal(as_array(np.array([np.nan, np.inf, 3e38]), "x"), np.float32([np.nan, np.inf, 3e38]))


def test_the_ends_of_int32_are_kept():
    ends = [-(2**31), 2**31 - 1]
    assert as_array(ends, "y").tolist() == ends


def test_a_table_of_several_types_is_one_array():
    table = pd.DataFrame({"a": [1.5, 2], "b": [True, False], "c": pd.Series([3, 4], dtype="Int64")})
    assert as_arrays(table, "x").tolist() == [[1.5, 1, 3], [2, 0, 4]]


def test_a_column_is_one_array():
    assert as_arrays(pd.Series([3, 1], index=[5, 7]), "y").tolist() == [3, 1]


def test_lists_of_numbers_are_one_array_and_other_containers_are_trees():
    tree = as_arrays({"a": [[1, 2], [3, 4]], "b": (X, [5]), "c": [X, X], "d": None}, "x")
    assert jax.tree.map(np.shape, tree) == {"a": (2, 2), "b": ((2, 3), (1,)), "c": [(2, 3), (2, 3)], "d": None}


NO_NUMBERS = {
    "strings": ["a", "b"],
    "objects": np.array([1, "b"], object),
    "table": pd.DataFrame({"a": [1, 2], "b": ["x", "y"]}),
    "dates": np.zeros(2, "M8[D]"),
    "durations": np.zeros(2, "m8[D]"),
    "object": object(),
}


@pytest.mark.parametrize("value", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_what_holds_no_numbers_is_refused_by_name(value):
    with pytest.raises(ValueError, match="^x must be an array of numbers, got"):
        as_arrays(value, "x")


@pytest.mark.parametrize("column", [pd.Series(["x", "y"]), pd.Series(pd.date_range("2020", periods=2))], ids=str)
def test_a_column_that_holds_no_numbers_is_named(column):
    with pytest.raises(ValueError, match="^x must be an array of numbers, got column 'b' of type (object|datetime64)"):
        as_arrays(pd.DataFrame({"a": [1, 2], "b": column}), "x")


def test_lists_of_unequal_lengths_are_refused_by_name():
    with pytest.raises(ValueError, match="^x must be an array of numbers, got .* inhomogeneous"):
        as_arrays([[1, 2], [3]], "x")


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i4", ">i8", ">u2", ">c8"])
def test_the_other_byte_order_is_swapped(dtype):
    found = as_array(np.arange(3).astype(dtype), "x")
    assert found.dtype.isnative
    np.testing.assert_array_equal(jnp.asarray(found), [0, 1, 2])


def test_what_is_masked_is_not_counted_as_numbers():
    x = np.ma.masked_equal(X, 3)
    for lists in ([x, x], (x, x)):
        with pytest.raises(ValueError, match="x has 2 masked entries: fill them"):
            as_array(lists, "x")
    with pytest.raises(ValueError, match="x has 1 masked entries: fill them"):
        as_array(x, "x")
    np.testing.assert_array_equal(as_array(np.ma.masked_equal(X, -999), "x"), X)
