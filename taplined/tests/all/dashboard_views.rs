//! The views of the dashboard in Chromium: their widths, the keyboard, and creating objects from them.

use std::thread;

use serde_json::json;

use crate::harness::chromium::{Browser, forward};
use crate::harness::disks::{plug, vbd, with_disks};
use crate::harness::{start, start_with, wait_until};
use crate::screen::{QEMU, has_qemu, machine, private};

/// Gives each VBD and each repository the health of a stopped process or a full file system, in place of the reported
/// one, in lists and in events.
const SICK: &str = r#"
    const health = (state) => ({ state, since: "2026-11-28T12:00:00Z", reason: `reason ${state}`, advice: "advice" });
    const infect = (kind, object) => {
        if (!object) return;
        if (kind === "vbd") object.health = health("stuck");
        if (kind === "sr") object.health = health("full");
        if (kind === "sr" && object.space) Object.assign(object.space, { free: 0, full: true });
    };
    const [real, parse] = [window.fetch, JSON.parse];
    JSON.parse = (...given) => {
        const value = parse(...given);
        infect(value?.kind, value?.object);
        return value;
    };
    window.fetch = async (path, options) => {
        const answer = await real(path, options);
        const kind = { "/v1/vbds": "vbd", "/v1/srs": "sr" }[path];
        if (!kind || !answer.ok) return answer;
        const all = await answer.json();
        for (const object of all) infect(kind, object);
        return new Response(JSON.stringify(all));
    };
"#;

/// Clipped texts of cells without names, and of buttons, states and headings.
const CLIPPED: &str = "JSON.stringify([...document.querySelectorAll('td:not(.grow), th, button, .tiles dd, .facts dd, h1, h2, \
     #attention p')]\
     .filter((one) => one.checkVisibility() && one.scrollWidth > one.clientWidth + 1).map((one) => one.textContent))";

#[test]
#[ignore = "slow: run by `make test-all`"]
fn no_word_is_clipped_at_any_width_in_either_theme() {
    let Some(mut page) = Browser::start() else { return };
    let names: Vec<String> = (0..200).map(|at| format!("web-{at:03}-root")).collect();
    let (daemon, vdis) = with_disks("", &names.iter().map(String::as_str).collect::<Vec<_>>());
    let vm = daemon.post("/vms", json!({ "name": "web-000", "driver": "qemu", "memory": 64 << 20, "vcpus": 1 })).1;
    let path = vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &path);
    let sr = daemon.get("/srs").1[0]["uuid"].as_str().unwrap().to_owned();
    daemon.done(daemon.post(&format!("/vdis/{}/snapshot", vdis[0]), json!({})));
    let scheduled = daemon.patch(&format!("/vdis/{}", vdis[1]), json!({ "retention": { "hourly": 24, "daily": 7 } }));
    assert_eq!(scheduled.0, 200, "{scheduled:?}");
    page.ask("Page.addScriptToEvaluateOnNewDocument", json!({ "source": SICK }));
    let origin = format!("http://localhost:{}", forward(daemon.socket()));
    let views = [
        "#/".to_owned(),
        "#/vms".into(),
        "#/disks".into(),
        "#/srs".into(),
        "#/schedules".into(),
        "#/tasks".into(),
        "#/tokens".into(),
        format!("#/vm/{}", vm["uuid"].as_str().unwrap()),
        format!("#/disk/{}", vdis[0]),
        format!("#/sr/{sr}"),
    ];
    for (theme, width) in
        [("light", 390), ("dark", 390), ("light", 1400), ("dark", 1400), ("light", 1920), ("dark", 1920)]
    {
        let size = json!({ "width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 500 });
        page.ask("Emulation.setDeviceMetricsOverride", size);
        page.ask(
            "Emulation.setEmulatedMedia",
            json!({ "features": [{ "name": "prefers-color-scheme", "value": theme }] }),
        );
        page.open(&origin);
        for (at, view) in views.iter().enumerate() {
            page.value(&format!("location.hash = '{view}'"));
            page.wait_for(
                "the banner shows the disk",
                "document.getElementById('attention')?.innerText.includes('stuck')",
            );
            page.wait_for(
                "the banner shows the repository",
                "document.getElementById('attention')?.innerText.includes('full')",
            );
            page.wait_for(
                "the view is drawn",
                "document.querySelector('h1')?.textContent.startsWith('Loading') === false",
            );
            // Numbers appear a second later, and columns grow with them.
            thread::sleep(std::time::Duration::from_millis(1500));
            let wide = page.value("document.documentElement.scrollWidth - innerWidth").as_i64().unwrap();
            let clipped = page.value(CLIPPED);
            page.screenshot(&format!("{width}-{theme}-{at}"));
            assert!(wide <= 0 && clipped == "[]", "{view} at {width}: {wide} too wide, clipped: {clipped}");
        }
        page.value("location.hash = '#/'");
        let first = "document.querySelector('table[aria-label=\"Disks by load\"] tbody tr[data-key] [data-level]')";
        page.wait_for("the stuck disk is first", &format!("{first}?.dataset.level === 'bad'"));
        page.wait_for("the bar is red", "document.querySelector('.space')?.dataset.level === 'bad'");
    }
    assert_eq!(page.errors(), Vec::<String>::new());
}

#[test]
fn keys_open_each_view_and_leave_it() {
    let Some(mut page) = Browser::start() else { return };
    let daemon = start();
    page.open(&format!("http://localhost:{}", forward(daemon.socket())));
    page.wait_for("the host is shown", "document.querySelector('main')?.innerText.includes('processors')");
    for (key, hash) in
        [("2", "#/vms"), ("3", "#/disks"), ("4", "#/srs"), ("5", "#/schedules"), ("6", "#/tasks"), ("7", "#/tokens")]
    {
        page.press(key);
        page.wait_for("the view is open", &format!("location.hash === '{hash}'"));
        page.wait_for("its link is marked", "document.querySelector('nav a[aria-current]').hash === location.hash");
    }
    page.press("Escape");
    page.wait_for("the overview is back", "location.hash === '#/'");
    page.press("t");
    page.wait_for("the theme changes", "document.documentElement.dataset.theme === 'dark'");
    assert_eq!(page.errors(), Vec::<String>::new());
}

#[test]
fn a_vm_and_its_disk_are_created_and_destroyed_from_the_page() {
    let Some(mut page) = Browser::start() else { return };
    let daemon = start();
    daemon.repository("disks");
    page.open(&format!("http://localhost:{}/#/vms", forward(daemon.socket())));
    page.wait_for("the lists are read", "document.body?.classList.contains('loaded')");
    page.click("Create a VM");
    page.wait_for("the dialog is open", "document.querySelector('dialog[open] input[name=name]')");
    page.value("document.querySelector('dialog input[name=name]').value = 'web'");
    page.value("document.querySelector('dialog input[name=size]').value = '16M'");
    page.value("document.querySelector('dialog button.primary').click()");
    wait_until("the VM has its disk", || daemon.get("/vbds").1.as_array().unwrap().len() == 1);
    let vm = daemon.get("/vms").1[0].clone();
    assert_eq!((&vm["name"], &vm["vcpus"], &vm["platform"]["vnc"]), (&json!("web"), &json!(2), &json!("private")));
    let vdi = daemon.get("/vdis").1[0].clone();
    assert_eq!((&vdi["name"], &vdi["size"]), (&json!("web"), &json!(16 << 20)));
    page.wait_for("its page is open", "document.querySelector('h1').textContent === 'web'");
    page.wait_for("its disk is listed", "document.querySelector('main').innerText.includes('unplugged')");
    page.click("Snapshot");
    page.wait_for("the dialog is open", "document.querySelector('dialog[open] input')");
    page.click("Take the snapshot");
    let revert = "[...document.querySelectorAll('td button')].find((one) => one.textContent === 'Revert')";
    page.wait_for("a snapshot can be reverted to", &format!("{revert} && !{revert}.disabled"));
    page.value(&format!("{revert}.click()"));
    page.wait_for("it is confirmed", "document.querySelector('dialog[open]')?.innerText.includes('is lost')");
    page.value("document.querySelector('dialog button.danger').click()");
    page.wait_for("it is done", "notes.innerText.includes(\"Revert of 'web': done\")");
    page.click("Destroy");
    page.wait_for("it is confirmed", "document.querySelector('dialog[open]')?.innerText.includes('Its disks stay')");
    page.value("document.querySelector('dialog button.danger').click()");
    wait_until("the VM is gone", || daemon.get("/vms").1 == json!([]));
    page.wait_for("the page says so", "document.querySelector('h1').textContent.startsWith('There is no VM')");
    // The page may request the snapshots of the VM while it is being destroyed.
    let errors = page.errors().into_iter().filter(|error| !(error.contains("/snapshots") && error.contains("404")));
    assert_eq!(errors.collect::<Vec<_>>(), Vec::<String>::new());
}

#[test]
fn the_screen_of_a_vm_is_shown_in_the_page() {
    let Some(mut page) = Browser::start().filter(|_| has_qemu()) else { return };
    let daemon = start_with(&format!("qemu-program = {QEMU:?}"), &[]);
    let vm = machine(&daemon, private());
    let uuid = vm.trim_start_matches("/vms/");
    page.open(&format!("http://localhost:{}/#/vm/{uuid}", forward(daemon.socket())));
    page.click("Open");
    let canvas = "document.querySelector('.screen canvas')";
    page.wait_for("the guest's resolution is known", &format!("{canvas}?.width >= 640"));
    let pixels = format!("{canvas}.getContext('2d').getImageData(0, 0, {canvas}.width, {canvas}.height).data");
    page.wait_for("the firmware writes", &format!("{pixels}.some((value, at) => at % 4 !== 3 && value > 0)"));
    page.screenshot("screen");
    // Keys go to the guest, even those that the page itself uses.
    page.value(&format!("{canvas}.focus()"));
    page.press("6");
    assert_eq!(page.value("location.hash"), json!(format!("#/vm/{uuid}")));
    page.click("Close");
    page.wait_for("the screen is closed", "document.querySelector('.screen').hidden");
    page.click("Open");
    page.wait_for("it is open again", &format!("{canvas}?.width >= 640"));
    assert_eq!(page.errors(), Vec::<String>::new());
    // From here on noVNC reports that the connection was closed.
    daemon.done(daemon.post(&format!("{vm}/shutdown"), json!({ "force": true })));
    page.wait_for("it closes with the machine", "document.querySelector('.screen').hidden");
}
