"""Writes the schemas that vllm and sglang publish for the routes and fields that rollouts use (see `servers`).

    python scripts/make_server_schemas.py vllm            # the vllm that this Python imports: pip install vllm
    python scripts/make_server_schemas.py sglang DIR      # the unpacked wheel of sglang, beside its package msgspec
    python scripts/make_server_schemas.py show

Each adds an entry `NAME VERSION` to tests/rl/server_schemas.json: for each route its query parameters, its body and
its answer as JSON schemas, cut down to the fields of FIELDS; null where the package does not describe them.
vLLM's are from its OpenAPI document and its pydantic models; SGLang's from its generated types (sglang/api/v1), and,
where these have none, from the annotations of srt/managers/io_struct.py and the decorators of http_server.py.
"""

import ast
import importlib
import inspect
import json
import sys
import typing
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "tests" / "rl" / "server_schemas.json"

VLLM_ROUTERS = (
    "openai.completion", "rl.online", "serve.dev.rpc", "serve.dev.cache", "serve.dev.server_info",
)  # fmt: skip
VLLM_ROUTES = (
    "POST /v1/completions", "GET /server_info", "POST /pause", "POST /collective_rpc", "POST /update_weight_version",
    "POST /reset_prefix_cache", "POST /resume",
)  # fmt: skip
SGLANG_ROUTES = {
    "POST /generate": ("GenerateRequest", "GenerateResponse"),
    "POST /pause_generation": ("PauseGenerationReqInput", None),
    "POST /update_weights_from_disk": ("UpdateWeightFromDiskReqInput", "UpdateWeightFromDiskReqOutput"),
    "POST /continue_generation": ("ContinueGenerationReqInput", None),
}
FIELDS = {
    "CompletionRequest": "prompt n max_tokens min_tokens temperature top_p top_k min_p repetition_penalty "
    "presence_penalty frequency_penalty seed logprobs stop_token_ids ignore_eos watermarking return_token_ids "
    "return_tokens_as_token_ids return_weight_versions",
    "CompletionResponse": "id object created model choices usage",
    "CompletionResponseChoice": "index text logprobs finish_reason stop_reason token_ids prompt_token_ids "
    "weight_versions",
    "UsageInfo": "prompt_tokens completion_tokens total_tokens",
    "GenerateRequest": "input_ids sampling_params return_logprob logprob_start_len return_text_in_logprobs "
    "return_prompt_token_ids stream",
    "SamplingParams": "n max_new_tokens min_new_tokens temperature top_p top_k min_p repetition_penalty "
    "presence_penalty frequency_penalty stop_token_ids ignore_eos no_stop_trim sampling_seed",
    "GenerateMetaInfo": "id finish_reason prompt_tokens completion_tokens output_token_logprobs "
    "output_token_logprobs_length weight_version weight_versions",
    "UpdateWeightFromDiskReqInput": "model_path flush_cache weight_version",
}
"""Of the classes that have more than these; of others all."""


def pruned(schema: Any, known: dict[str, Any]) -> Any:
    """A schema of the fields that are used, with references resolved and without texts."""
    if isinstance(schema, list):
        return [pruned(each, known) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return pruned(known[name] | {"title": name}, known)
    found = {
        key: value for key, value in schema.items() if key not in ("title", "description", "default", "properties")
    }
    found = {key: pruned(value, known) for key, value in found.items()}
    if "properties" in schema:
        used = FIELDS.get(schema.get("title", ""), " ".join(schema["properties"])).split()
        found["properties"] = {
            name: pruned(schema["properties"][name], known) for name in used if name in schema["properties"]
        }
    return found


def of_vllm() -> tuple[str, dict[str, Any]]:
    """Its version, and its routes."""
    import fastapi
    import vllm
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse

    app = fastapi.FastAPI()
    for name in VLLM_ROUTERS:
        app.include_router(importlib.import_module(f"vllm.entrypoints.{name}.api_router").router)
    document, answer = app.openapi(), CompletionResponse.model_json_schema()
    schemas = document["components"]["schemas"]
    routes: dict[str, Any] = {}
    for route in VLLM_ROUTES:
        method, path = route.split()
        about = document["paths"][path][method.lower()]
        body = about.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
        routes[route] = {
            "query": {each["name"]: pruned(each["schema"], schemas) for each in about.get("parameters", [])},
            "body": body and pruned(body, schemas),
            "answer": pruned(answer, answer["$defs"]) if path == "/v1/completions" else None,
        }
        (routes[route]["answer"] or {}).pop("$defs", None)
    return vllm.__version__, routes


def schema_of(hint: Any) -> dict[str, Any]:
    """The schema of a type hint."""
    plain = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
    if hint in plain:
        return {"type": plain[hint]}
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Union:
        return {"anyOf": [schema_of(each) for each in of]}
    if origin is typing.Literal:
        return {"enum": list(of)}
    if origin is list:
        return {"type": "array", "items": schema_of(of[0])}
    if inspect.isclass(hint) and hasattr(hint, "__struct_fields__"):
        return struct_schema(hint)
    return {"type": "object"} if origin is dict else {}


def struct_schema(cls: Any) -> dict[str, Any]:
    """The schema of a generated type, whose docstring says whether it is an array and refuses unknown keys."""
    hints = typing.get_type_hints(cls)
    fields = {name: schema_of(hints[name]) for name in FIELDS.get(cls.__name__, " ".join(hints)).split()}
    if "positional array" in cls.__doc__:
        return {"type": "array", "prefixItems": list(fields.values()), "minItems": len(fields), "maxItems": len(fields)}
    return {"type": "object", "properties": fields, "additionalProperties": "unknown keys rejected" not in cls.__doc__}


def annotated(source: Path, name: str) -> dict[str, Any]:
    """The schema of a class in a file that is parsed, not imported."""
    tree = ast.parse(source.read_text())
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    fields = {node.target.id: node for node in body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    used = FIELDS.get(name, " ".join(fields)).split()
    hints = {field: eval(ast.unparse(fields[field].annotation), vars(typing).copy()) for field in used}
    required = [field for field in used if fields[field].value is None]
    return {
        "type": "object",
        "properties": {field: schema_of(hint) for field, hint in hints.items()},
        "required": required,
    }


def of_sglang(directory: Path) -> tuple[str, dict[str, Any]]:
    """Its version, and its routes."""
    package = directory / "sglang"
    sys.path.insert(0, str(package / "api" / "v1"))
    types = importlib.import_module("api_types")
    served = ast.parse((package / "srt" / "entrypoints" / "http_server.py").read_text())
    decorators = [ast.unparse(each) for node in served.body for each in getattr(node, "decorator_list", ())]
    routes: dict[str, Any] = {}
    for route, names in SGLANG_ROUTES.items():
        path = repr(route.split()[1])
        assert any(each.startswith((f"app.post({path}", f"app.api_route({path}")) for each in decorators), route
        body, answer = (
            name
            and (
                struct_schema(getattr(types, name))
                if hasattr(types, name)
                else annotated(package / "srt" / "managers" / "io_struct.py", name)
            )
            for name in names
        )
        routes[route] = {"query": {}, "body": body, "answer": answer}
    (about,) = directory.glob("sglang-*.dist-info")
    return about.name.removeprefix("sglang-").removesuffix(".dist-info"), routes


def main(words: list[str]) -> None:
    """Adds an entry, or lists the entries."""
    entries = json.loads(OUT.read_text()) if OUT.exists() else {}
    if words[:1] != ["show"]:
        version, routes = of_vllm() if words[0] == "vllm" else of_sglang(Path(words[1]))
        entries[f"{words[0]} {version}"] = routes
        OUT.write_text(json.dumps(dict(sorted(entries.items())), separators=(",", ":"), sort_keys=True) + "\n")
    for name, routes in entries.items():
        print(name, *routes, sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])
