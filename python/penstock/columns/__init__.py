"""Column types, one per file. Each defines its schema entry, what it accepts, and what it can do. The list of all types is here."""

from penstock.columns.blob import Bytes as Bytes
from penstock.columns.boxes import Boxes as Boxes
from penstock.columns.category import Category as Category
from penstock.columns.column_type import ColumnType
from penstock.columns.image import Image as Image
from penstock.columns.json_text import Json as Json
from penstock.columns.keypoints import Keypoints as Keypoints
from penstock.columns.label import Label as Label
from penstock.columns.label import Labels as Labels
from penstock.columns.mask import Mask as Mask
from penstock.columns.scalar import Scalar as Scalar
from penstock.columns.tensor import Tensor as Tensor
from penstock.columns.text import Text as Text

TYPES: dict[str, type[ColumnType]] = {
    kind.type: kind for kind in vars().values() if isinstance(kind, type) and issubclass(kind, ColumnType) and kind is not ColumnType
}
