"""Coder: what rewrites that splice a sparse autoencoder or transcoder into a site share."""

import os
from collections.abc import Mapping
from typing import Any, ClassVar

import keras
import numpy as np

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError
from backbone_surgery.opening.site import Place, Site
from backbone_surgery.rewriting.amounts import bind_amounts
from backbone_surgery.rewriting.fields import Fields
from backbone_surgery.rewriting.rewrite import ControlledRewrite, Rows, Surgery


class Coder(ControlledRewrite):
    """Splice a sparse coder into one site; its features have a site of their own.

    Attributes:
        path: the folder.
        amount: the default of the control.
        error: whether to keep the error of the reconstruction.
        layers: the layers, to use instead of reading `path`.
    """

    path: str
    amount: float
    error: bool
    layers: tuple[keras.layers.Layer, ...]

    files: ClassVar[tuple[str, ...]] = ("path",)

    def check_fields(self) -> Fields:
        """Check what all coders have."""
        fields = Fields(self)
        fields.selector()
        fields.name()
        fields.number("amount")
        fields.flag("error")
        fields.instance("path", str | os.PathLike, "the path of a folder or a file")  # type: ignore[arg-type]
        fields.instance("layers", list | tuple, "`layers` as a tuple")  # type: ignore[arg-type]
        fields.keep("layers", tuple(self.layers))
        return fields

    def visitor(self, surgery: Surgery) -> graph.CloneFn:
        """Declare the control, then visit the site."""
        places = self.choose(surgery)
        if len(places) != 1:
            raise SurgeryError(
                f"{type(self).__name__} at '{self.at}': expected one site, the one that it was "
                f"trained on. Received {', '.join(p.path for p in places)}. Use one for each."
            )
        surgery.control(f"{self.name}_amount", np.float32(self.amount))
        return super().visitor(surgery)

    def site_of(
        self, encoded: keras.KerasTensor, role: str, place: Place, surgery: Surgery
    ) -> keras.KerasTensor:
        """Put the site of the features behind the encoder."""
        path = role if place.block is None else f"blocks.{place.block}.{role}"
        if path in [p.path for p in surgery.places]:
            raise SurgeryError(
                f"{type(self).__name__} at '{place.path}': expected a block without another "
                f"spliced one, so that '{path}' is one site. Received a second one. Splice one of "
                "them into another block."
            )
        return Site(role, name=f"{self.name}_latents")(encoded)

    def bind(self, value: Any, rows: Rows) -> Mapping[str, np.ndarray]:
        """Bind an amount: a number, or one for each row."""
        value = self.amount if value is None else value
        return {
            f"{self.name}_amount": bind_amounts(value, f"controls at '{self.name}'", rows.batch)
        }
