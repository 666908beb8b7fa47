"""Adapters that are loaded and dropped while the server runs."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

from maxtext.adapters.peft_folder import read_adapter
from maxtext.adapters.spec import Adapter
from maxtext.common.errors import UserError
from maxtext.common.types import Json
from maxtext.inference.server.errors import ApiError
from maxtext.inference.server.model import ServedModel
from maxtext.inference.server.protocol import LoadAdapterRequest, UnloadAdapterRequest
from maxtext.inference.validation import RequestError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


class AdapterUpdates:
    """Loads adapters of folders below `root`. Without a root, updates are not allowed."""

    def __init__(self, model: ServedModel, root: Path | None):
        self.model = model
        self.root = None if root is None else root.resolve()
        self.lock = asyncio.Lock()  # one update at a time

    async def load(self, request: LoadAdapterRequest) -> Json:
        """Load an adapter and return its model card."""
        self.check_allowed()
        name = request.lora_name
        if not NAME.fullmatch(name):
            raise RequestError(
                "lora_name must have 1 to 128 letters, digits or any of . _ : / -", "lora_name"
            )
        folder = self.find_folder(request.lora_path)
        adapter = await asyncio.to_thread(self.read, folder, request.lora_path)
        async with self.lock:
            if name in self.model.all_names():
                raise RequestError(f"there is a model {name!r} already", "lora_name")
            await self.update(lambda: self.model.llm.add_adapter(name, adapter))
        return self.model.card(name)

    async def unload(self, request: UnloadAdapterRequest) -> Json:
        self.check_allowed()
        name = request.lora_name
        if not name:
            raise RequestError("lora_name is missing", "lora_name")
        async with self.lock:
            if not self.model.find(name, "lora_name")[1]:
                raise RequestError(f"{name!r} is the model itself, no adapter", "lora_name")
            await self.update(lambda: self.model.llm.drop_adapter(name))
        return {"id": name, "object": "model", "deleted": True}

    async def update(self, function: Callable[[], None]) -> None:
        """Call a function when the running requests have finished. An update that has begun goes on
        if the client leaves.
        """
        self.model.engine.check_accepts(0)
        await asyncio.shield(asyncio.wrap_future(self.model.engine.update(function)))

    def check_allowed(self) -> None:
        if self.root is None:
            raise ApiError(
                403,
                "this server does not load or drop adapters: start it with --allow-lora-updates",
                "permission_error",
            )

    def find_folder(self, text: str) -> Path:
        """The folder of a request, below the root and without symbolic links. Raises RequestError,
        which does not tell whether something else exists.
        """
        assert self.root is not None, "updates are allowed"
        error = RequestError(
            "lora_path must be the folder of an adapter below the server's --lora-root, without "
            "symbolic links",
            "lora_path",
        )
        if not text or "\x00" in text or ".." in Path(text).parts:
            raise error
        folder = self.root / text  # an absolute path stays as it is
        try:
            is_below = folder.is_relative_to(self.root) and folder != self.root
            # The root has no links, so this finds those below it.
            if not is_below or folder.resolve(strict=True) != folder or not folder.is_dir():
                raise error
            if any(file.is_symlink() for file in folder.iterdir()):
                raise error
        except (OSError, RuntimeError) as caught:
            raise error from caught
        return folder

    def read(self, folder: Path, text: str) -> Adapter:
        """Read a folder. Errors name it as the request did."""
        try:
            return read_adapter(folder, self.model.llm.config)
        except UserError as error:
            raise RequestError(str(error).replace(str(folder), text), "lora_path") from error
