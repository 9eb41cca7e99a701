//! `/`: the dashboard, a page of static files (`web/`) that are part of the program.
//!
//! Invariant: the files contain nothing about the host. They are therefore served without a token; the requests that
//! the page makes carry one where needed.

mod vendored;

use axum::Router;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, HeaderValue, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{Method, Uri};
use axum::middleware::{from_fn, map_response};
use axum::response::Response;
use axum::routing::get;

use super::etag;
use crate::daemon::Daemon;

/// Only the daemon's own files and responses; no frames, and no text that becomes HTML or a script.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
                      base-uri 'none'; frame-ancestors 'none'; form-action 'none'; require-trusted-types-for 'script'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JS: &str = "text/javascript; charset=utf-8";
const TEXT: &str = "text/plain; charset=utf-8";

macro_rules! web {
    ($name:literal) => {
        include_str!(concat!("../../../web/", $name))
    };
}

/// A file: its path, its content type, and its text.
type File = (&'static str, &'static str, &'static str);

/// The dashboard's own files, by path.
const FILES: &[File] = &[
    ("/", HTML, web!("index.html")),
    ("/web/style.css", CSS, web!("style.css")),
    ("/web/actions-vm.js", JS, web!("actions-vm.js")),
    ("/web/actions.js", JS, web!("actions.js")),
    ("/web/api.js", JS, web!("api.js")),
    ("/web/attention.js", JS, web!("attention.js")),
    ("/web/create.js", JS, web!("create.js")),
    ("/web/dom.js", JS, web!("dom.js")),
    ("/web/events.js", JS, web!("events.js")),
    ("/web/format.js", JS, web!("format.js")),
    ("/web/health.js", JS, web!("health.js")),
    ("/web/history.js", JS, web!("history.js")),
    ("/web/layers.js", JS, web!("layers.js")),
    ("/web/main.js", JS, web!("main.js")),
    ("/web/parts.js", JS, web!("parts.js")),
    ("/web/plots.js", JS, web!("plots.js")),
    ("/web/screen.js", JS, web!("screen.js")),
    ("/web/snapshots.js", JS, web!("snapshots.js")),
    ("/web/store.js", JS, web!("store.js")),
    ("/web/table.js", JS, web!("table.js")),
    ("/web/upload.js", JS, web!("upload.js")),
    ("/web/view-disk.js", JS, web!("view-disk.js")),
    ("/web/view-schedules.js", JS, web!("view-schedules.js")),
    ("/web/view-tokens.js", JS, web!("view-tokens.js")),
    ("/web/view-vm.js", JS, web!("view-vm.js")),
    ("/web/view-vms.js", JS, web!("view-vms.js")),
    ("/web/views.js", JS, web!("views.js")),
];

/// All files.
fn files() -> impl Iterator<Item = File> {
    FILES.iter().chain(vendored::FILES).copied()
}

/// Whether a request is for one of the files, which need no token.
pub fn is_for_file(method: &Method, uri: &Uri) -> bool {
    matches!(*method, Method::GET | Method::HEAD) && files().any(|(path, ..)| path == uri.path())
}

/// The routes of the dashboard's files.
pub fn routes() -> Router<Daemon> {
    let add = |router: Router<Daemon>, (path, kind, text): File| {
        router.route(path, get(move || async move { ([(CONTENT_TYPE, kind)], text) }))
    };
    let all = files().fold(Router::new(), add);
    all.route_layer(from_fn(etag::read)).route_layer(map_response(protect))
}

/// Browsers revalidate each file every time: files of two versions would not fit together.
async fn protect(mut response: Response) -> Response {
    let all: [(HeaderName, &str); 4] = [
        (CACHE_CONTROL, "no-cache"),
        (CONTENT_SECURITY_POLICY, POLICY),
        (REFERRER_POLICY, "no-referrer"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    response.headers_mut().extend(all.map(|(name, value)| (name, HeaderValue::from_static(value))));
    response
}

#[cfg(test)]
mod test {
    use std::path::Path;

    use super::*;

    /// The files below a directory, by their paths from `web/`.
    fn files(directory: &Path, below: &str) -> Vec<String> {
        let entries = std::fs::read_dir(directory.join(below)).unwrap().map(Result::unwrap);
        entries
            .flat_map(|entry| {
                let path = format!("{below}{}", entry.file_name().to_str().unwrap());
                if entry.path().is_dir() { files(directory, &format!("{path}/")) } else { vec![path] }
            })
            .collect()
    }

    #[test]
    fn each_file_of_the_directory_is_served() {
        let mut there = files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../web"), "");
        let mut served: Vec<String> =
            super::files().map(|(path, ..)| path.strip_prefix("/web/").unwrap_or("index.html").to_owned()).collect();
        there.sort();
        served.sort();
        assert_eq!(served, there);
    }

    #[test]
    fn our_scripts_put_no_text_into_html_and_name_no_other_host() {
        for (path, _, text) in FILES {
            let mut words = vec!["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("];
            words.extend([
                "http://",
                "https://",
                " style=",
                " onclick=",
                " onload=",
                " onerror=",
                "<script>",
                "<style>",
            ]);
            for word in words {
                assert!(!text.contains(word), "{path} has {word}");
            }
        }
    }
}
