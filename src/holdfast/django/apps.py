"""The configuration of the app in `INSTALLED_APPS`: its name, and a check of the setting when the project starts."""

from typing import Any

from django.apps import AppConfig
from django.core.checks import Error, register
from django.core.exceptions import ImproperlyConfigured


class HoldfastConfig(AppConfig):  # type: ignore[misc]
    """Holdfast as an app of a project. It has no models: its tables are in its own store."""

    name = "holdfast.django"
    label = "holdfast"
    verbose_name = "Holdfast"

    def ready(self) -> None:
        """Let `manage.py check` check the setting."""
        register(check_configuration)


def check_configuration(app_configs: Any, **options: Any) -> list[Any]:
    """Return the problems of the setting `HOLDFAST`, in Django's format."""
    from holdfast.django import configuration  # imported here: apps are not loaded when Django imports this module

    try:
        configuration()
    except ImproperlyConfigured as problem:
        return [Error(str(problem), id="holdfast.E001")]
    return []
