//! `cargo xtask clients`: generates the operations of the Python client from the API's document.
//!
//! The transport is written by hand (`clients/python/tapline/_transport.py`). A test fails if the committed file is
//! stale.

use std::fmt::Write;
use std::path::Path;

use serde_json::{Map, Value};

/// The API's document.
const DOCUMENT: &str = "docs/openapi.json";

/// The generated file.
const PYTHON: &str = "clients/python/tapline/_operations.py";

/// Maximum length of a line.
const WIDTH: usize = 120;

/// Keywords of Python that cannot be names of parameters.
const RESERVED: [&str; 4] = ["for", "from", "import", "in"];

const HEAD: &str = "\"\"\"The operations of the API. Generated from docs/openapi.json by `cargo xtask clients`: not to be edited.\"\"\"

from ._transport import UNSET, Transport


def _given(fields):
    return {name: value for name, value in fields.items() if value is not UNSET}


class Operations(Transport):
    \"\"\"Each operation as a method with the API's name; what is left out is the daemon's default.\"\"\"
";

/// Runs the chore.
pub fn run() -> Result<(), String> {
    let text = generated(Path::new("."))?;
    std::fs::write(PYTHON, text).map_err(|error| format!("cannot write {PYTHON}: {error}"))
}

fn generated(root: &Path) -> Result<String, String> {
    let path = root.join(DOCUMENT);
    let text = std::fs::read_to_string(&path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let document = serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(operations(&document))
}

/// The text of the whole file.
fn operations(document: &Value) -> String {
    let mut methods: Vec<(&str, String)> = Vec::new();
    for (path, item) in document["paths"].as_object().into_iter().flatten() {
        for (verb, operation) in item.as_object().into_iter().flatten() {
            let name = operation["operationId"].as_str().unwrap_or_default();
            methods.push((name, Method::of(document, path, verb, operation).python(name)));
        }
    }
    methods.sort();
    methods.into_iter().fold(HEAD.to_owned(), |text, (_, method)| text + "\n" + &method)
}

/// A parameter of a method.
struct Argument {
    /// Its name in the API.
    field: String,
    /// Its name in Python.
    name: String,
    text: String,
    required: bool,
}

/// An operation as a method of the client.
struct Method<'a> {
    verb: String,
    path: &'a str,
    summary: String,
    returns: String,
    in_path: Vec<Argument>,
    in_query: Vec<Argument>,
    in_body: Option<Vec<Argument>>,
    /// Whether the body is raw bytes.
    sends_bytes: bool,
    has_if_match: bool,
    is_list: bool,
    is_stream: bool,
}

impl<'a> Method<'a> {
    fn of(document: &Value, path: &'a str, verb: &str, operation: &Value) -> Method<'a> {
        let parameters = operation["parameters"].as_array().map(Vec::as_slice).unwrap_or_default();
        let place = |place: &str| -> Vec<Argument> {
            let here = parameters.iter().filter(|parameter| parameter["in"] == place);
            let argument = |parameter: &Value| Argument {
                field: parameter["name"].as_str().unwrap_or_default().to_owned(),
                name: word(&parameter["name"]),
                text: sentence(&parameter["description"]),
                required: parameter["required"] == true,
            };
            here.map(argument).collect()
        };
        let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
        let answer = &operation["responses"]["200"]["content"]["application/json"]["schema"];
        let is_list = answer["type"] == "array" && parameters.iter().any(|parameter| parameter["name"] == "after");
        let in_path = place("path");
        let mut in_body = schema.is_object().then(|| fields(resolved(document, schema)));
        // If an object in the path and one in the body have the same name, the latter is the new object's UUID.
        for argument in in_body.iter_mut().flatten() {
            if in_path.iter().any(|other| other.name == argument.name) {
                argument.name.insert_str(0, "new_");
            }
        }
        Method {
            verb: verb.to_uppercase(),
            path,
            summary: sentence(&operation["summary"]),
            returns: returned(operation, is_list),
            in_path,
            in_query: place("query"),
            in_body,
            sends_bytes: operation["requestBody"]["content"]["application/octet-stream"].is_object(),
            has_if_match: place("header").iter().any(|header| header.name == "if_match"),
            is_list,
            is_stream: operation["responses"]["200"]["content"]["text/event-stream"].is_object(),
        }
    }

    /// The text of the method.
    fn python(&self, name: &str) -> String {
        let body = self.in_body.iter().flatten();
        let (required, optional): (Vec<&Argument>, Vec<&Argument>) =
            self.in_query.iter().chain(body).partition(|argument| argument.required);
        let mut arguments: Vec<String> = vec!["self".into()];
        arguments.extend(self.in_path.iter().map(|argument| argument.name.clone()));
        arguments.extend(self.sends_bytes.then(|| "data".to_owned()));
        let named = required.iter().map(|argument| argument.name.clone());
        let named = named.chain(optional.iter().map(|argument| format!("{}=UNSET", argument.name)));
        let mut named: Vec<String> = named.collect();
        if self.has_if_match {
            named.push("if_match=None".into());
        }
        if !named.is_empty() {
            arguments.push("*".into());
            arguments.append(&mut named);
        }
        let mut text = wrapped(&format!("    def {name}("), &arguments, "):\n");
        text += &documented(&self.summary, self.described(), &self.returns);
        text += &self.call();
        text
    }

    fn described(&self) -> impl Iterator<Item = &Argument> {
        let body = self.in_body.iter().flatten();
        self.in_path.iter().chain(&self.in_query).chain(body).filter(|argument| !argument.text.is_empty())
    }

    /// The call of the transport.
    fn call(&self) -> String {
        let given = |arguments: &[Argument]| {
            let pairs = arguments.iter().map(|argument| format!("\"{}\": {}", argument.field, argument.name));
            pairs.collect::<Vec<_>>()
        };
        let path = match self.in_path.is_empty() {
            true => format!("\"{}\"", self.path),
            false => format!("f\"{}\"", self.path),
        };
        let query = given(&self.in_query);
        if self.is_list || self.is_stream {
            let how = if self.is_list { "pages" } else { "events" };
            return wrapped(&format!("        return self.{how}({path}, {{"), &query, "})\n");
        }
        let mut text = String::new();
        let mut options = vec![format!("\"{}\"", self.verb), path];
        if !query.is_empty() {
            text += &wrapped("        query = {", &query, "}\n");
            options.push("query=query".into());
        }
        if let Some(body) = &self.in_body {
            text += &wrapped("        body = _given({", &given(body), "})\n");
            options.push("body=body".into());
        }
        if self.sends_bytes {
            options.push("body=data".into());
        }
        if self.has_if_match {
            options.push("if_match=if_match".into());
        }
        text + &wrapped("        return self.request(", &options, ")\n")
    }
}

/// A sentence about the response of an operation.
fn returned(operation: &Value, is_list: bool) -> String {
    let responses = &operation["responses"];
    let named = |schema: &Value| schema["$ref"].as_str().and_then(|name| name.rsplit('/').next()).map(str::to_owned);
    let content = |status: &str| &responses[status]["content"]["application/json"]["schema"];
    if is_list {
        let what = named(&content("200")["items"]).unwrap_or_else(|| "object".into());
        return format!("Yields each `{what}`.");
    }
    let plan = named(content("200"));
    match (responses["202"].is_object(), plan) {
        (true, Some(plan)) => format!("Returns a `Task` to wait for, or a `{plan}`."),
        (true, None) => "Returns a `Task` to wait for.".into(),
        (false, plan) => plan.or(named(content("201"))).map(|what| format!("Returns a `{what}`.")).unwrap_or_default(),
    }
}

fn resolved<'a>(document: &'a Value, schema: &'a Value) -> &'a Value {
    let pointer = schema["$ref"].as_str().and_then(|reference| reference.strip_prefix('#'));
    pointer.and_then(|pointer| document.pointer(pointer)).unwrap_or(schema)
}

/// The fields of a body.
fn fields(schema: &Value) -> Vec<Argument> {
    let empty = Map::new();
    let required = |name: &str| schema["required"].as_array().is_some_and(|all| all.iter().any(|one| one == name));
    let properties = schema["properties"].as_object().unwrap_or(&empty);
    let argument = |(name, field): (&String, &Value)| {
        let nested = field["oneOf"].as_array().and_then(|kinds| kinds.iter().find_map(|kind| kind.get("description")));
        let text = field.get("description").or(nested).unwrap_or(&Value::Null);
        let required = required(name);
        Argument { field: name.clone(), name: word(&Value::String(name.clone())), text: sentence(text), required }
    };
    properties.iter().map(argument).collect()
}

/// A name in Python's spelling.
fn word(name: &Value) -> String {
    let word = name.as_str().unwrap_or_default().replace('-', "_").to_lowercase();
    if RESERVED.contains(&word.as_str()) { word + "_" } else { word }
}

/// A text on one line.
fn sentence(text: &Value) -> String {
    text.as_str().unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The docstring of a method.
fn documented<'a>(summary: &str, arguments: impl Iterator<Item = &'a Argument>, returns: &str) -> String {
    let mut text = filled("        \"\"\"", summary, "        ");
    let mut arguments = arguments.peekable();
    if arguments.peek().is_none() && returns.is_empty() {
        return text.trim_end().to_owned() + "\"\"\"\n";
    }
    let mut is_first = true;
    for Argument { name, text: what, .. } in arguments {
        if std::mem::take(&mut is_first) {
            text.push('\n');
        }
        text += &filled(&format!("        {name}: "), what, "            ");
    }
    if !returns.is_empty() {
        // Writing to a string cannot fail.
        write!(text, "\n        {returns}\n").unwrap_or_default();
    }
    text + "        \"\"\"\n"
}

/// A paragraph wrapped to the width.
fn filled(first: &str, text: &str, indent: &str) -> String {
    let (mut all, mut line, mut is_empty) = (String::new(), first.to_owned(), true);
    for word in text.replace('\\', "\\\\").split(' ') {
        if !is_empty && line.len() + 1 + word.len() > WIDTH {
            all += line.trim_end();
            all.push('\n');
            (line, is_empty) = (indent.to_owned(), true);
        }
        if !is_empty {
            line.push(' ');
        }
        line += word;
        is_empty = false;
    }
    all + line.trim_end() + "\n"
}

/// Brackets with their contents, on one line if that fits.
fn wrapped(open: &str, contents: &[String], close: &str) -> String {
    let line = format!("{open}{}{close}", contents.join(", "));
    if line.trim_end().len() <= WIDTH {
        return line;
    }
    let outer = &open[..open.len() - open.trim_start().len()];
    let inner = format!("{outer}    ");
    let lines = filled(&inner, &(contents.join(", ") + ","), &inner);
    format!("{open}\n{lines}{outer}{close}")
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_committed_client_is_current() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let committed = std::fs::read_to_string(root.join(PYTHON)).unwrap_or_default();
        assert!(committed == generated(&root).unwrap(), "{PYTHON} is stale: run cargo xtask clients");
        assert!(committed.lines().all(|line| line.chars().count() <= WIDTH));
    }
}
