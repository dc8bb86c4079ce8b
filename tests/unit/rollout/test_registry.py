from types import ModuleType

import pytest

import learner.registry
import rollout.registry

MODULES = [rollout.registry, learner.registry]


@pytest.mark.parametrize("registry", MODULES)
def test_an_object_is_imported_by_its_path(registry: ModuleType) -> None:
    assert registry.load_object("math:hypot")(3, 4) == 5


@pytest.mark.parametrize("registry", MODULES)
@pytest.mark.parametrize("spec", ["math.hypot", "math:", ":hypot", ""])
def test_another_form_is_refused(registry: ModuleType, spec: str) -> None:
    with pytest.raises(ValueError, match=r"not of the form 'my\.module:name'"):
        registry.load_object(spec)


@pytest.mark.parametrize("registry", MODULES)
def test_a_missing_name_or_module_is_said(registry: ModuleType) -> None:
    with pytest.raises(ValueError, match="module 'math' has no 'hypo'"):
        registry.load_object("math:hypo")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        registry.load_object("no_such_module:name")
