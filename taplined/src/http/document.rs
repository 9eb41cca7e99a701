//! The OpenAPI document: the handlers' declarations, and parts common to many operations.
//!
//! Headers, examples and problems are added here, by the shape of an operation, so that none can be forgotten.

use std::sync::LazyLock;

use api::{Code, Kind, Problem};
use serde_json::{Map, Value, json};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::{OpenApi as OpenApiDocument, RefOr, Required};
use utoipa::{Modify, OpenApi};

use Code::{Busy, Exists, Failed, Forbidden, InUse, Internal, Invalid, NoSpace, NotFound, ReadOnly, State, Timeout};

/// The parts of the document that are not declared by handlers.
#[derive(OpenApi)]
#[openapi(modifiers(&Bearer), components(schemas(Problem)), security((), ("token" = [])), info(
    title = "Tapline",
    description = "Storage repositories, disks and VMs of one host. Long-running operations return a task.",
    license(name = "Apache-2.0")
), servers((url = "/", description = "This host's Unix socket, or its address with TLS")), tags(
    (name = "host", description = "The host and its daemon"),
    (name = "sr", description = "Storage repositories, which contain disks"),
    (name = "vdi", description = "Virtual disk images"),
    (name = "upload", description = "Files that clients send, to be imported"),
    (name = "download", description = "Exported disks that clients fetch"),
    (name = "vbd", description = "Virtual block devices, which attach disks to VMs"),
    (name = "vm", description = "Virtual machines"),
    (name = "backup", description = "Backups of disks on other storage"),
    (name = "task", description = "Long-running operations"),
    (name = "statistics", description = "What the disks do: counters, latencies, requests in flight"),
    (name = "event", description = "Changes of objects"),
    (name = "token", description = "Tokens for access over TCP"),
    (name = "api", description = "What the API says about itself"),
))]
pub struct Document;

/// Authentication of requests over TCP; the Unix socket needs none.
struct Bearer;

impl Modify for Bearer {
    fn modify(&self, document: &mut OpenApiDocument) {
        let text =
            "The secret of a token; required over TCP only. On the Unix socket, the kernel identifies the caller.";
        let scheme = Http::builder().scheme(HttpAuthScheme::Bearer).description(Some(text)).build();
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("token", SecurityScheme::Http(scheme));
    }
}

/// An example of each schema of a request or response, by name.
static EXAMPLES: LazyLock<Map<String, Value>> =
    LazyLock::new(|| serde_json::from_str(include_str!("examples.json")).unwrap_or_default());

static TEXT: LazyLock<Result<String, Problem>> = LazyLock::new(make);

const PROBLEM_JSON: &str = "application/problem+json";

/// Problems of single operations, in addition to those of the operation's shape.
const PROBLEMS: &[(&str, &[Code])] = &[
    ("host_reconcile", &[Failed]),
    ("host_backup", &[NoSpace, Failed]),
    ("sr_create", &[Exists, Code::Unsupported, NoSpace, Failed]),
    ("sr_probe", &[Failed, Timeout]),
    ("sr_introduce", &[Exists, NotFound, Failed, Timeout]),
    ("sr_destroy", &[InUse, Busy, State]),
    ("sr_attach", &[Busy]),
    ("sr_detach", &[Busy, InUse]),
    ("sr_scan", &[Busy, State]),
    ("sr_calibrate", &[Busy, InUse, NotFound, ReadOnly, State]),
    ("sr_forget", &[Busy, InUse, State]),
    ("sr_inventory", &[State, Failed, Timeout]),
    ("sr_inventory_at", &[NotFound, Failed, Timeout]),
    ("backup_target_add", &[Exists, State, Failed, Timeout]),
    ("backup_target_backups", &[State, Failed, Timeout]),
    ("backup_target_restore", &[Exists, State, NoSpace, Failed, Timeout]),
    ("backup_target_restore_vm", &[Exists, State, NoSpace, Failed, Timeout]),
    ("vdi_restore_in_place", &[InUse, Busy, State, ReadOnly, NoSpace, Failed, Timeout]),
    ("vm_restore_in_place", &[InUse, Busy, State, ReadOnly, NoSpace, Failed, Timeout]),
    ("vdi_backup", &[NotFound, State]),
    ("vm_backup", &[NotFound, State]),
    ("vdi_create", &[NotFound, Exists, State, Code::Unsupported, NoSpace]),
    ("vdi_import", &[NotFound, Exists, State, Code::Unsupported, NoSpace]),
    ("upload_create", &[NotFound, NoSpace, State, Code::Overloaded]),
    ("upload_append", &[Busy, NoSpace, State, Failed, Timeout]),
    ("download_read", &[State, Failed, Timeout]),
    ("vdi_patch", &[InUse, State]),
    ("vdi_destroy", &[InUse, Busy, ReadOnly]),
    ("vdi_resize", &[Busy, State, ReadOnly, Code::Unsupported, NoSpace]),
    ("vdi_snapshot", &[Exists, Busy, State, Code::Unsupported, NoSpace]),
    ("vdi_clone", &[Exists, Busy, State, Code::Unsupported, NoSpace]),
    ("vdi_revert", &[InUse, Busy, State, NoSpace]),
    ("vdi_copy", &[Exists, InUse, Busy, State, NoSpace]),
    ("vdi_export", &[Exists, InUse, Busy, State, NoSpace, Code::Overloaded]),
    ("vdi_merge", &[Busy, State]),
    ("vdi_reconcile", &[Busy, State]),
    ("vbd_create", &[NotFound, Exists, ReadOnly, Code::Unsupported]),
    ("vbd_destroy", &[InUse, State]),
    ("vbd_plug", &[Busy, InUse, State]),
    ("vbd_unplug", &[Busy, State]),
    ("vbd_upgrade", &[Busy, State]),
    ("vbd_plug_many", &[NotFound, Busy]),
    ("vbd_unplug_many", &[NotFound, Busy]),
    ("vbd_connect", &[State]),
    ("vbd_statistics", &[State, Failed]),
    ("statistics_list", &[Failed]),
    ("metrics", &[Failed]),
    ("vm_create", &[Exists, Code::Unsupported]),
    ("vm_patch", &[State]),
    ("vm_destroy", &[Busy, State]),
    ("vm_start", &[Busy, State]),
    ("vm_shutdown", &[Busy, State]),
    ("vm_pause", &[Busy, State]),
    ("vm_snapshot", &[Exists, Busy, State, Code::Unsupported, NoSpace]),
    ("vm_snapshot_destroy", &[InUse, Busy, ReadOnly]),
    ("vm_snapshot_patch", &[State]),
    ("vm_revert", &[InUse, Busy, State, NoSpace]),
    ("vm_clone", &[NotFound, Exists, Busy, State, Code::Unsupported, NoSpace]),
    ("vm_console", &[State, Code::Overloaded]),
    ("vm_screen", &[State, Code::Overloaded]),
    ("vm_resume", &[Busy, State]),
    ("vm_suspend", &[Busy, State, Code::Unsupported, NoSpace]),
    ("vm_drop_memory", &[Busy, State]),
    ("task_cancel", &[State]),
    ("task_abandon", &[State]),
    ("token_list", &[Forbidden]),
    ("token_show", &[Forbidden]),
    ("token_create", &[Exists]),
];

/// The document as JSON text.
pub fn text() -> Result<&'static str, Problem> {
    TEXT.as_deref().map_err(Clone::clone)
}

fn make() -> Result<String, Problem> {
    let (_, mut document) = super::routes().split_for_parts();
    relax_bodies(&mut document);
    let failed = |error| Problem::failed("encode the OpenAPI document", error);
    let mut document = serde_json::to_value(&document).map_err(failed)?;
    for (path, item) in document["paths"].as_object_mut().into_iter().flatten() {
        for (method, operation) in item.as_object_mut().into_iter().flatten() {
            complete(path, method, operation);
        }
    }
    let referring = document["paths"].to_string();
    document["components"]["examples"] = components(&referring);
    let text = serde_json::to_string_pretty(&document).map_err(failed)?;
    Ok(format!("{text}\n"))
}

/// Marks bodies optional if an object without fields is valid ([`super::extract`]).
fn relax_bodies(document: &mut OpenApiDocument) {
    let value = serde_json::to_value(&*document).unwrap_or_default();
    let has_required = |reference: &str| {
        let schema = reference.strip_prefix('#').and_then(|pointer| value.pointer(pointer));
        schema.is_none_or(|schema| schema.get("required").is_some())
    };
    for item in document.paths.paths.values_mut() {
        let operations = [&mut item.post, &mut item.patch, &mut item.delete].into_iter().flatten();
        for body in operations.filter_map(|operation| operation.request_body.as_mut()) {
            let schemas = body.content.values().filter_map(|content| content.schema.as_ref());
            let mut references = schemas.map(|schema| match schema {
                RefOr::Ref(reference) => reference.ref_location.as_str(),
                RefOr::T(_) => "",
            });
            if !references.any(has_required) {
                body.required = Some(Required::False);
            }
        }
    }
}

/// Adds headers, examples and problems to an operation.
fn complete(path: &str, method: &str, operation: &mut Value) {
    let id = operation["operationId"].as_str().unwrap_or_default().to_owned();
    let without = ["/v1/tokens", "/v1/uploads", "/v1/downloads", "/v1/backup-targets"];
    let has_versions = !without.iter().any(|list| path.starts_with(list));
    let (changes, of_object) = (method != "get", path.contains("{uuid}") && has_versions);
    let is_document = !changes && is_object(&operation["responses"]["200"]["content"]["application/json"]["schema"]);
    let mut codes = vec![Code::Unauthorized];
    if changes {
        codes.extend([Forbidden, Code::MissingRole]);
        if id != "token_create" {
            add_header(operation, "Idempotency-Key", "A new random UUID for each request. A repetition is done once.");
            codes.push(Code::KeyReused);
        }
    }
    if changes && of_object {
        add_header(operation, "If-Match", "The ETag that the object must still have.");
        codes.push(Code::Changed);
    }
    if is_document {
        add_header(operation, "If-None-Match", "The ETag that the client knows: the answer is 304 if it still has it.");
        let response = json!({ "description": "The client has this version.", "headers": { "ETag": header(ETAG) } });
        operation["responses"]["304"] = response;
        operation["responses"]["200"]["headers"]["ETag"] = header(ETAG);
    }
    if has_parameter(operation, "limit") && !path.ends_with("/events") {
        operation["responses"]["200"]["headers"]["Link"] = header("The next page, as rel=\"next\", if there is one.");
    }
    if path.contains('{') {
        codes.push(NotFound);
    }
    if operation.get("requestBody").is_some() {
        codes.extend([Code::Malformed, Code::MediaType]);
        add_examples(&mut operation["requestBody"]["content"]);
    }
    codes.push(Invalid);
    codes.extend(PROBLEMS.iter().filter(|(named, _)| *named == id).flat_map(|(_, codes)| *codes));
    codes.push(Internal);
    for (status, response) in operation["responses"].as_object_mut().into_iter().flatten() {
        match status.as_str() {
            "201" => response["headers"]["Location"] = header("The new object."),
            "202" => response["headers"]["Location"] = header("The task."),
            _ => {}
        }
        response.get_mut("content").into_iter().for_each(add_examples);
    }
    add_problems(&mut operation["responses"], &codes);
    for others in ["4XX", "5XX"] {
        let content = json!({ PROBLEM_JSON: { "schema": problem_schema() } });
        operation["responses"][others] = json!({ "description": "Any other problem.", "content": content });
    }
}

/// The description of the header.
const ETAG: &str = "The version of the object, for If-Match and If-None-Match.";

fn header(description: &str) -> Value {
    json!({ "description": description, "schema": { "type": "string" } })
}

fn problem_schema() -> Value {
    json!({ "$ref": "#/components/schemas/Problem" })
}

fn has_parameter(operation: &Value, name: &str) -> bool {
    operation["parameters"].as_array().into_iter().flatten().any(|parameter| parameter["name"] == name)
}

fn add_header(operation: &mut Value, name: &str, description: &str) {
    let parameter = json!({
        "name": name, "in": "header", "required": false, "description": description,
        "schema": { "type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$" },
    });
    match operation["parameters"].as_array_mut() {
        Some(parameters) => parameters.push(parameter),
        None => operation["parameters"] = json!([parameter]),
    }
}

fn is_object(schema: &Value) -> bool {
    schema.is_object() && schema["type"] != "array"
}

/// The examples of a body with this schema, by name; those of named schemas are kept once, among the components.
fn examples_of(schema: &Value) -> Option<Value> {
    if schema["type"] == "array" {
        let (name, example) = example_of(&schema["items"])?;
        return Some(json!({ name: { "value": [example] } }));
    }
    let (name, _) = example_of(schema)?;
    Some(json!({ name: { "$ref": format!("#/components/examples/{name}") } }))
}

/// The name and example of a referenced schema.
fn example_of(schema: &Value) -> Option<(&str, &Value)> {
    let name = schema["$ref"].as_str()?.rsplit('/').next()?;
    Some((name, EXAMPLES.get(name)?))
}

fn add_examples(content: &mut Value) {
    for (kind, body) in content.as_object_mut().into_iter().flatten() {
        if body.get("example").is_some() {
            continue;
        }
        let examples = match kind.as_str() {
            "text/plain" => {
                let text = "-chardev socket,id=tapline0,path=/run/tapline/vbd/b7c6a2f0/disk.sock";
                Some(json!({ "qemu": { "value": text } }))
            }
            "application/octet-stream" => Some(json!({ "piece": { "value": "QFI\u{fb}…" } })),
            "text/event-stream" => example_of(&body["schema"]).map(|(name, event)| {
                json!({ name: { "value": format!("event: change\nid: {}\ndata: {event}\n\n", event["seq"]) } })
            }),
            _ => examples_of(&body["schema"]),
        };
        if let Some(examples) = examples {
            body["examples"] = examples;
        }
        if kind == "text/event-stream" {
            // The stream is text; the schema describes the data of each event.
            let data = body["schema"].take();
            body["schema"] =
                json!({ "type": "string", "contentMediaType": "text/event-stream", "contentSchema": data });
        }
    }
}

/// The examples that operations refer to: of schemas and of kinds of problems.
fn components(referring: &str) -> Value {
    let problems = api::KINDS.iter().map(|Kind { code, word, meaning, advice, .. }| {
        let mut problem = Problem::new(*code, *meaning).advise(*advice);
        problem.field = (*code == Invalid).then(|| "size".into());
        ((*word).to_owned(), json!({ "value": problem }))
    });
    let objects = EXAMPLES.iter().map(|(name, example)| (name.clone(), json!({ "value": example })));
    let is_used = |name: &str| referring.contains(&format!("\"#/components/examples/{name}\""));
    Value::Object(objects.chain(problems).filter(|(name, _)| is_used(name)).collect())
}

/// Adds a response for each status of these problems, with an example of each.
fn add_problems(responses: &mut Value, codes: &[Code]) {
    for code in codes {
        let Kind { word, status, title, .. } = code.kind();
        let response = &mut responses[status.to_string()];
        match response["description"].as_str() {
            Some(others) if others.contains(title) => {}
            Some(others) => response["description"] = json!(format!("{others}; {title}")),
            None => response["description"] = json!(title),
        }
        let content = &mut response["content"][PROBLEM_JSON];
        content["schema"] = problem_schema();
        content["examples"][*word] = json!({ "$ref": format!("#/components/examples/{word}") });
    }
}

#[cfg(test)]
mod test {
    use std::collections::HashSet;

    use super::super::index::{Index, ProblemType};
    use super::*;

    /// Read at run time: the document is generated by this program.
    fn manual(name: &str) -> String {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/").to_owned() + name;
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    #[test]
    fn the_committed_document_is_the_one_of_the_routes() {
        let committed = manual("openapi.json");
        assert!(text().unwrap() == committed, "run: cargo run -p taplined -- --openapi > docs/openapi.json");
    }

    #[test]
    fn bodies_without_required_fields_are_optional_and_all_references_exist() {
        let document: serde_json::Value = serde_json::from_str(text().unwrap()).unwrap();
        let body = |path: &str| document["paths"][path]["post"]["requestBody"]["required"].as_bool().unwrap();
        assert!(!body("/v1/host/drain") && !body("/v1/vbds/{uuid}/unplug") && body("/v1/srs"));
        let text = document.to_string();
        for reference in text.split("\"$ref\":\"#").skip(1).filter_map(|rest| rest.split('"').next()) {
            assert!(document.pointer(reference).is_some(), "{reference}");
        }
    }

    #[test]
    fn the_manual_lists_each_code_with_its_status() {
        let manual = manual("api.md");
        for Kind { word, status, .. } in api::KINDS {
            assert!(manual.contains(&format!("\n| `{word}` | {status} | ")), "{word}");
        }
    }

    fn document() -> Value {
        serde_json::from_str(text().unwrap()).unwrap()
    }

    /// All operations, by their names.
    fn operations(document: &Value) -> Vec<(String, &Value)> {
        let items = document["paths"].as_object().unwrap().values();
        let all = items.flat_map(|item| item.as_object().unwrap().values());
        all.map(|operation| (operation["operationId"].as_str().unwrap().to_owned(), operation)).collect()
    }

    #[test]
    fn each_operation_has_examples_of_its_request_its_answers_and_its_problems() {
        let document = document();
        let operations = operations(&document);
        assert!(operations.len() > 50, "{}", operations.len());
        let is_shown = |body: &Value| body.get("example").is_some() || body.get("examples").is_some();
        for (id, operation) in operations {
            let bodies = operation["requestBody"]["content"].as_object().into_iter().flatten();
            let responses = operation["responses"].as_object().unwrap();
            let answers = responses.iter().filter(|(status, _)| !status.ends_with("XX"));
            let contents = answers.filter_map(|(_, response)| response["content"].as_object()).flatten();
            for (kind, body) in bodies.chain(contents) {
                assert!(is_shown(body), "{id}: {kind}");
            }
            // A connection that is upgraded has 101.
            assert!(responses.keys().any(|status| status.starts_with(['1', '2'])), "{id}");
            for status in ["400", "401", "500"] {
                assert!(is_shown(&responses[status]["content"][PROBLEM_JSON]), "{id}: {status}");
            }
        }
    }

    #[test]
    fn nothing_in_the_document_is_null() {
        assert!(!text().unwrap().contains(": null"));
    }

    #[test]
    fn problems_are_listed_for_operations_that_exist() {
        let document = document();
        let known: HashSet<String> = operations(&document).into_iter().map(|(id, _)| id).collect();
        for (id, _) in PROBLEMS {
            assert!(known.contains(*id), "{id}");
        }
    }

    /// Checks an example by deserializing it as its type and serializing it again.
    fn is_one<T: serde::de::DeserializeOwned + serde::Serialize>(name: &str) -> String {
        let example = EXAMPLES.get(name).unwrap_or_else(|| panic!("no example of {name}"));
        let read: T = serde_json::from_value(example.clone()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let again = serde_json::to_value(read).unwrap();
        for (field, value) in example.as_object().unwrap() {
            match value {
                // Inner objects have defaults of their own.
                Value::Object(_) | Value::Array(_) => assert!(again.get(field).is_some(), "{name}: {field}"),
                _ => assert_eq!(&again[field], value, "{name}: {field}"),
            }
        }
        name.to_owned()
    }

    macro_rules! are {
        ($($type:ident),*) => { [$(is_one::<api::$type>(stringify!($type))),*] };
    }

    #[test]
    fn each_example_is_one_of_its_type() {
        let known = are![
            Backup,
            BackupPrune,
            BackupRemove,
            BackupTarget,
            BackupTargetAdd,
            Difference,
            DiskBackup,
            DiskLimits,
            DiskShare,
            DiskStatistics,
            Event,
            Host,
            HostDrain,
            HostReconcile,
            Inventory,
            Sr,
            SrAttach,
            SrCalibrate,
            SrCalibration,
            SrCreate,
            SrDestroyPlan,
            SrFound,
            SrIntroduce,
            SrPatch,
            SrProbe,
            Task,
            Token,
            TokenCreate,
            TokenMade,
            Download,
            Upload,
            UploadCreate,
            Vbd,
            VbdCreate,
            VbdHistory,
            VbdPatch,
            VbdUnplug,
            Vbds,
            Vdi,
            VdiBackup,
            VdiChanges,
            VdiClone,
            VdiCopy,
            VdiCreate,
            VdiDestroyPlan,
            VdiExport,
            VdiImport,
            VdiPatch,
            VdiReconcile,
            VdiResize,
            VdiRestore,
            VdiRestoreInPlace,
            VdiRevert,
            VdiSnapshot,
            Vm,
            VmBackup,
            VmCreate,
            VmClone,
            VmPatch,
            VmRestore,
            VmRestoreInPlace,
            VmRevert,
            VmShutdown,
            VmSnapshot,
            VmSnapshotCreate,
            VmSnapshotPatch
        ];
        let own = [is_one::<Index>("Index"), is_one::<ProblemType>("ProblemType")];
        let known: HashSet<String> = known.into_iter().chain(own).collect();
        assert_eq!(known, EXAMPLES.keys().cloned().collect());
    }
}
