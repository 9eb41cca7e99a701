//! The dashboard: its files, refused requests of browsers, and the page itself in Chromium.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use serde_json::{Value, json};

use crate::harness::chromium::{Browser, forward};
use crate::harness::disks::{io, nbd, plug, vbd, with_disks};
use crate::harness::tls::{Authority, any_token, port, rest};
use crate::harness::{Taplined, start, start_with, wait_until};

/// Sends a request with exactly these headers; returns the status and the response.
fn raw(daemon: &Taplined, request: &str, headers: &[&str]) -> (u16, String) {
    let mut stream = UnixStream::connect(daemon.socket()).unwrap();
    let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
    stream.write_all(format!("{request} HTTP/1.1\r\nconnection: close\r\n{headers}\r\n").as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    (answer.split(' ').nth(1).unwrap().parse().unwrap(), answer)
}

#[test]
fn the_files_are_served_with_a_policy_and_a_tag() {
    let daemon = start();
    for (path, kind) in [
        ("/", "text/html; charset=utf-8"),
        ("/web/main.js", "text/javascript; charset=utf-8"),
        ("/web/style.css", "text/css; charset=utf-8"),
        ("/web/uplot/LICENSE", "text/plain; charset=utf-8"),
    ] {
        let whole = daemon.exchange("GET", path, &[], "");
        assert_eq!((whole.status, whole.header("content-type")), (200, Some(kind)), "{path}");
        let policy = whole.header("content-security-policy").unwrap();
        for part in ["default-src 'none'", "script-src 'self';", "frame-ancestors 'none'", "base-uri 'none'"] {
            assert!(policy.contains(part), "{policy}");
        }
        assert!(!policy.contains("unsafe"), "{policy}");
        let same = [("cache-control", "no-cache"), ("x-content-type-options", "nosniff")];
        assert!(same.iter().all(|(name, value)| whole.header(name) == Some(value)), "{whole:?}");
        let tag = whole.header("etag").unwrap();
        let known = daemon.exchange("GET", path, &[("if-none-match", tag)], "");
        assert_eq!((known.status, &*known.body, known.header("etag")), (304, "", Some(tag)));
        assert_eq!(known.header("cache-control"), Some("no-cache"));
        let head = daemon.exchange("HEAD", path, &[], "");
        assert_eq!((head.status, head.header("etag"), &*head.body), (200, Some(tag), ""));
        let posted = daemon.exchange("POST", path, &[], "");
        assert_eq!(posted.refusal(), (405, "method".into(), String::new()));
    }
    for path in ["/web", "/web/", "/web/nothing.js", "/web/../web/main.js", "/index.html", "/favicon.ico"] {
        assert_eq!(daemon.exchange("GET", path, &[], "").refusal(), (404, "not-found".into(), String::new()), "{path}");
    }
}

#[test]
fn over_tcp_the_files_need_no_token_and_everything_else_does() {
    let authority = Authority::new();
    let daemon = authority.start("");
    let status = |request: &str| {
        let mut talk = authority.connect(&daemon);
        talk.write_all(format!("{request} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n").as_bytes()).unwrap();
        rest(&mut talk).split(' ').nth(1).unwrap().parse::<u16>().unwrap()
    };
    for file in ["GET /", "HEAD /", "GET /?x", "GET /web/main.js", "GET /web/uplot/uPlot.min.css"] {
        assert_eq!(status(file), 200, "{file}");
    }
    for other in
        ["POST /", "DELETE /web/main.js", "GET /web/nothing.js", "GET //", "GET /v1", "GET /v1/docs", "GET /metrics"]
    {
        assert_eq!(status(other), 401, "{other}");
    }
}

#[test]
fn pages_and_names_of_other_sites_change_and_read_nothing() {
    let daemon = start_with("[api]\nhosts = [\"tapline.example.org\"]", &[]);
    let own = ["host: localhost:8080", "origin: http://localhost:8080"];
    let proxied = ["host: tapline.example.org", "origin: https://tapline.example.org"];
    for headers in [&own[..], &proxied, &["host: localhost"]] {
        assert_eq!(raw(&daemon, "GET /v1/host", headers).0, 200, "{headers:?}");
        assert_eq!(raw(&daemon, "POST /v1/host/backups", headers).0, 201, "{headers:?}");
    }
    let kept = daemon.get("/host/backups").1.as_array().unwrap().len();
    for (headers, field) in [
        (["host: localhost:8080", "origin: https://evil.example"], "origin"),
        (["host: localhost:8080", "origin: http://localhost:9090"], "origin"),
        (["host: localhost:8080", "origin: null"], "origin"),
        (["host: evil.example:8080", "origin: http://evil.example:8080"], "host"),
        (["host: evil.example", "accept: */*"], "host"),
    ] {
        for request in ["POST /v1/host/backups", "DELETE /v1/vdis/1", "PATCH /v1/vdis/1", "POST /v1/nothing"] {
            let (status, answer) = raw(&daemon, request, &headers);
            assert!(status == 403 && answer.contains(&format!("\"field\":\"{field}\"")), "{headers:?}: {answer}");
        }
        // No header lets a page of another site read the response; under its own origin it would need none.
        let (status, answer) = raw(&daemon, "GET /v1/host", &headers);
        assert_eq!(status, if field == "host" { 403 } else { 200 }, "{headers:?}");
        assert!(!answer.to_ascii_lowercase().contains("access-control-"), "{answer}");
        let upgrade = [headers[0], headers[1], "connection: upgrade", "upgrade: websocket"];
        assert_eq!(raw(&daemon, "GET /v1/host", &upgrade).0, 403, "{headers:?}");
    }
    assert_eq!(daemon.get("/host/backups").1.as_array().unwrap().len(), kept);
    // A browser's preflight for a request that a page of another site may not make by itself.
    let asked = ["host: localhost", "origin: https://evil.example", "access-control-request-method: DELETE"];
    let (status, answer) = raw(&daemon, "OPTIONS /v1/vdis/1", &asked);
    assert!(status >= 400 && !answer.to_ascii_lowercase().contains("access-control-allow"), "{answer}");
}

/// Reads and writes until dropped.
fn busy(at: String) -> impl Drop {
    struct Busy(Arc<AtomicBool>, Option<thread::JoinHandle<()>>);
    impl Drop for Busy {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
            self.1.take().unwrap().join().unwrap();
        }
    }
    let stop = Arc::new(AtomicBool::new(false));
    let told = stop.clone();
    let worker = thread::spawn(move || {
        while !told.load(Ordering::Relaxed) {
            io(&at, &["write -P 7 0 64k", "write -P 8 1M 64k", "flush", "read -P 7 0 4k", "read 64k 4k", "flush"]);
        }
    });
    Busy(stop, Some(worker))
}

/// The number in a cell of the first row of the first table.
const IOPS: &str = "parseFloat(document.querySelector('tbody tr[data-key]')?.cells[2].textContent)";

/// A name that would run a script if it became HTML.
const NAME: &str = "<img src=x onerror=alert(1)>";

#[test]
fn the_page_shows_what_disks_do_and_takes_a_snapshot() {
    let Some(mut page) = Browser::start() else { return };
    let (daemon, vdis) = with_disks("", &["disk"]);
    let path = vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &path);
    let busy = busy(nbd(&daemon, &path));
    let origin = format!("http://localhost:{}", forward(daemon.socket()));
    page.open(&origin);
    page.wait_for("the disk is listed", "document.querySelector('tbody tr[data-key]')");
    page.value("document.querySelector('tbody tr[data-key]').click()");
    page.wait_for("the disk is shown", "document.querySelector('h1').textContent === 'disk'");
    page.wait_for("latencies are plotted", "document.querySelector('.heat')?.ariaLabel?.startsWith('The last')");
    page.wait_for("stages are listed", "document.querySelector('.stages tbody').innerText.includes('write')");
    let iops =
        "[...document.querySelectorAll('section[aria-label=IOPS] .u-value')].map((one) => parseFloat(one.innerText))";
    page.wait_for("reads and writes are plotted", &format!("{iops}[1] > 0 && {iops}[2] > 0"));
    page.click("Snapshot");
    page.wait_for("the dialog is open", "document.querySelector('dialog[open] input')");
    page.value(&format!("document.querySelector('dialog input').value = {NAME:?}"));
    page.click("Take the snapshot");
    page.wait_for("the snapshot is listed", &format!("document.querySelector('main').innerText.includes({NAME:?})"));
    let snapshots = daemon.get(&format!("/vdis?snapshot_of={}", vdis[0])).1;
    assert_eq!((snapshots.as_array().unwrap().len(), &snapshots[0]["name"]), (1, &json!(NAME)));
    assert_eq!(page.value("document.querySelectorAll('img').length"), 0);
    page.click("Limit");
    page.wait_for("the dialog is open", "document.querySelector('dialog[open] input[name=iops]')");
    page.value("document.querySelector('dialog input[name=iops]').value = '5000'");
    page.value("document.querySelector('dialog input[name=bandwidth]').value = '100M'");
    page.click("Set the limits");
    let limits = || daemon.get(&path).1["limits"].clone();
    wait_until("the limits are set", || limits() == json!({ "iops": 5000, "bandwidth": 100 << 20 }));
    page.click("Share");
    page.wait_for("the dialog is open", "document.querySelector('dialog[open] input[name=weight]')");
    page.value("document.querySelector('dialog input[name=weight]').value = '300'");
    page.click("Set the weight");
    wait_until("the weight is set", || daemon.get(&path).1["share_weight"] == 300);
    drop(busy);
    assert_eq!(page.errors(), Vec::<String>::new());
    let elsewhere = |url: &String| !url.starts_with(&origin) && !url.starts_with("data:");
    assert!(!page.requests().iter().any(elsewhere), "{:?}", page.requests());
}

/// Responses with statistics of a thousand disks, in place of the daemon's.
const THOUSAND: &str = r#"
    const real = window.fetch;
    const stages = (n) => Object.fromEntries(
        ["ring", "map", "split", "queue", "storage", "completion", "notify"].map((stage) => [stage, n * 1000]));
    let asked = 0;
    window.fetch = (path, options) => {
        if (path !== "/v1/statistics") return real(path, options);
        asked += 1;
        const disks = Array.from({ length: 1000 }, (_, at) => ({
            vbd: "00000000-0000-4000-8000-" + String(at).padStart(12, "0"), vdi: "v" + at, vdi_name: "disk-" + at,
            vm_name: "vm", position: 0, sr: "s", sr_name: "sr", at: new Date().toISOString(), clock_ns: asked * 1e9,
            processes: 1, in_flight: at % 3, oldest_ns: 1e6, sleeps: 0, polls_hit: 0, polls_missed: 0, requests: [],
            operations: ["read", "write"].map((operation) => ({ operation, count: asked * at, size: asked * at * 4096,
                errors: 0, split: 0, longest_ns: 1, in_flight: 0, stages: stages(asked * at) })),
        }));
        return Promise.resolve(new Response(JSON.stringify(disks)));
    };
    window.longTasks = [];
    new PerformanceObserver((list) => window.longTasks.push(...list.getEntries().map((one) => one.duration)))
        .observe({ entryTypes: ["longtask"] });
"#;

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_thousand_disks_are_found_by_keyboard_in_a_table_of_a_few_rows() {
    let Some(mut page) = Browser::start() else { return };
    let daemon = start();
    page.ask("Page.addScriptToEvaluateOnNewDocument", json!({ "source": THOUSAND }));
    page.open(&format!("http://localhost:{}", forward(daemon.socket())));
    page.wait_for("the rates are shown", &format!("{IOPS} > 0"));
    let table = "document.querySelector('table[aria-label=\"Disks by load\"]')";
    assert_eq!(page.value(&format!("{table}.getAttribute('aria-rowcount')")), "1001");
    let lines = page.value(&format!("{table}.rows.length")).as_u64().unwrap();
    assert!(lines < 100, "{lines}");
    page.value(&format!("{table}.parentElement.scrollTop = 1e6"));
    page.wait_for("the last row", &format!("[...{table}.rows].some((row) => row.ariaRowIndex === '1001')"));
    for key in ["/", "d", "i", "s", "k", "-", "7", "7", "7"] {
        page.press(key);
    }
    page.wait_for("one disk is left", &format!("{table}.getAttribute('aria-rowcount') === '2'"));
    thread::sleep(std::time::Duration::from_secs(3));
    let long = page.value("JSON.stringify(longTasks)");
    // Bypasses the capture of test output; the times are for people, since no test may depend on speed.
    let said = format!("1000 disks: the page's tasks of more than 50 ms took (in ms): {}\n", long.as_str().unwrap());
    std::io::stderr().write_all(said.as_bytes()).unwrap();
    page.press("Enter");
    page.press("Enter");
    page.wait_for("the disk is opened", "location.hash.startsWith('#/disk/v777/')");
    page.press("Escape");
    page.wait_for("the overview is back", "location.hash === '#/'");
    page.press("?");
    page.wait_for("help", "document.querySelector('dialog[open]')?.innerText.includes('Keyboard')");
    assert_eq!(page.errors(), Vec::<String>::new());
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn the_page_fits_a_phone_marks_old_data_and_recovers() {
    let Some(mut page) = Browser::start() else { return };
    let (mut daemon, vdis) = with_disks("", &["a disk with a name that is too long for a phone"]);
    let path = vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &path);
    let origin = format!("http://localhost:{}", forward(daemon.socket()));
    page.ask(
        "Emulation.setEmulatedMedia",
        json!({ "features": [{ "name": "prefers-color-scheme", "value": "dark" }] }),
    );
    page.open(&origin);
    page.wait_for("the disk is listed, and idle", &format!("{IOPS} === 0"));
    let busy = busy(nbd(&daemon, &path));
    page.wait_for("its rate is shown", &format!("{IOPS} > 0"));
    let first = page.value(IOPS);
    page.wait_for("the rate moves", &format!("{IOPS} !== {first}"));
    let background = "getComputedStyle(document.body).backgroundColor";
    let dark = page.value(background);
    page.screenshot("dark");
    page.click("Theme: auto");
    page.click("Theme: dark");
    assert_ne!(page.value(background), dark, "the switch says light");
    page.screenshot("light");
    page.click("Theme: light");
    let phone = json!({ "width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": true });
    page.ask("Emulation.setDeviceMetricsOverride", phone);
    for hash in ["#/", "#/srs", "#/vms", &format!("#/disk/{}", vdis[0])] {
        page.value(&format!("location.hash = '{hash}'"));
        page.wait_for("the view is drawn", "document.querySelector('h1').textContent !== 'Loading…'");
        page.wait_for("it is not wider than the screen", "document.documentElement.scrollWidth <= 360");
        page.screenshot(&format!("phone{}", hash.len()));
    }
    drop(busy);
    page.wait_for("it is served", "document.querySelector('main').innerText.includes('Wake-ups')");
    daemon.kill();
    page.wait_for("old data is marked", "document.body.classList.contains('stale') && !stale.hidden");
    page.screenshot("stale");
    daemon.restart();
    page.wait_for("it recovers", "!document.body.classList.contains('stale') && stale.hidden");
    page.value("location.hash = '#/vms'");
    page.wait_for("it is live again", "document.querySelector('main').innerText.includes('plugged')");
    let thrown = page.errors().into_iter().filter(|error| error.contains("exceptionDetails"));
    assert_eq!(thrown.collect::<Vec<_>>(), Vec::<String>::new());
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn over_tcp_the_page_prompts_for_a_token_and_keeps_it_out_of_addresses() {
    let Some(mut page) = Browser::start() else { return };
    let authority = Authority::new();
    let daemon = authority.start("");
    let secret = any_token(&daemon);
    page.open(&format!("https://127.0.0.1:{}", port(&daemon)));
    for (token, sees) in [("tapline_wrong", "dialog[open] .bad"), (&*secret, "dl.tiles div")] {
        page.wait_for("the token is asked for", "document.querySelector('dialog[open] input')");
        page.value(&format!("document.querySelector('dialog input').value = {token:?}"));
        page.click("Use it");
        page.wait_for("the daemon answers", &format!("document.querySelector({sees:?})"));
    }
    page.wait_for("the host is shown", "document.querySelector('main').innerText.includes('processors')");
    assert_eq!(page.value("JSON.stringify(localStorage)").as_str().map(|kept| kept.contains(&secret)), Some(false));
    assert_eq!(page.value("document.cookie"), Value::from(""));
    assert!(page.requests().iter().all(|url| !url.contains(&secret)), "{:?}", page.requests());
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn the_page_does_each_action_and_says_why_one_was_refused() {
    let Some(mut page) = Browser::start() else { return };
    let (daemon, vdis) = with_disks("", &["disk"]);
    let path = vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &path);
    page.open(&format!("http://localhost:{}/#/disk/{}", forward(daemon.socket()), vdis[0]));
    let said = |page: &mut Browser, text: &str| {
        page.wait_for(text, &format!("document.getElementById('notes').innerText.includes({text:?})"));
        page.value("document.getElementById('notes').replaceChildren()");
    };
    let type_in = |page: &mut Browser, text: &str| {
        page.wait_for("the dialog is open", "document.querySelector('dialog[open] input')");
        let set = format!("input.value = {text:?}; input.dispatchEvent(new Event('input'))");
        page.value(&format!("{{ const input = document.querySelector('dialog input'); {set} }}"));
    };
    page.click("Resize");
    type_in(&mut page, "8M");
    assert_eq!(page.value("document.querySelector('dialog input').checkValidity()"), false, "a disk only grows");
    type_in(&mut page, "32M");
    page.value("document.querySelector('dialog button.primary').click()");
    said(&mut page, "Resize of 'disk': done");
    assert_eq!(daemon.get(&format!("/vdis/{}", vdis[0])).1["size"], 32 << 20);
    page.click("Clone");
    type_in(&mut page, "disk"); // a name that is taken
    page.click("Create the clone");
    said(&mut page, "Clone of 'disk': not done");
    page.click("Clone");
    type_in(&mut page, "copy");
    page.click("Create the clone");
    said(&mut page, "Clone of 'disk': done");
    for (button, state) in [("Unplug", "unplugged"), ("Plug", "plugged")] {
        page.click(button);
        page.wait_for("the dialog is open", "document.querySelector('dialog[open]')");
        page.value("document.querySelector('dialog button[value=do]').click()");
        said(&mut page, &format!("{button} of 'disk': done"));
        assert_eq!(crate::harness::disks::state(&daemon, &path), state);
    }
    let clone = daemon.get("/vdis?name=copy").1[0]["uuid"].as_str().unwrap().to_owned();
    page.value(&format!("location.hash = '#/disk/{clone}'"));
    page.click("Destroy");
    page.wait_for(
        "what would be removed is said",
        "document.querySelector('dialog[open]')?.innerText.includes('frees')",
    );
    page.value("document.querySelector('dialog button.danger').click()");
    said(&mut page, "Destroy 'copy': done");
    page.wait_for("it is gone", "document.querySelector('h1').innerText.startsWith('There is no disk')");
    assert_eq!(daemon.get(&format!("/vdis/{clone}")).0, 404);
    // A hidden page sends no requests.
    page.value("Object.defineProperty(document, 'hidden', { get: () => true })");
    page.value("document.dispatchEvent(new Event('visibilitychange'))");
    thread::sleep(std::time::Duration::from_millis(500));
    page.value("1");
    let before = page.requests().len();
    thread::sleep(std::time::Duration::from_secs(3));
    page.value("1");
    assert_eq!(page.requests().len(), before);
}
