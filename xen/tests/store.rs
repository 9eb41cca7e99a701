//! The behaviour of a store, checked on the fake one and, if XENSTORED_PATH names its socket, on the real xenstored.
//!
//! Each test uses its own part of the tree, so that a store in use is not disturbed.

use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use xen::xenstored::XenstoredClient;
use xen::{DomId, Store, StoreError, WatchEvent, fake};

/// Runs a test on two clients of each available store, with a path below which it may write.
fn each_store(name: &str, claim: impl Fn(&mut dyn Store, &mut dyn Store, &str)) {
    let top = format!("/tapline-test/{name}-{}", std::process::id());
    let host = fake::Host::new().unwrap();
    let (mut one, mut other) = (host.store(DomId(0)).unwrap(), host.store(DomId(0)).unwrap());
    claim(&mut one, &mut other, &top);
    drop((one, other));
    assert_eq!(host.counts(), fake::Counts::default());

    if std::env::var_os("XENSTORED_PATH").is_some() {
        let (mut one, mut other) = (XenstoredClient::connect().unwrap(), XenstoredClient::connect().unwrap());
        claim(&mut one, &mut other, &top);
        one.remove(None, &top).unwrap();
    }
}

fn readable(store: &dyn Store, wait_ms: i64) -> bool {
    let timeout = Timespec { tv_sec: wait_ms / 1000, tv_nsec: wait_ms % 1000 * 1_000_000 };
    poll(&mut [PollFd::from_borrowed_fd(store.fd().as_fd(), PollFlags::IN)], Some(&timeout)).unwrap() > 0
}

/// Waits for one event.
fn event(store: &mut dyn Store) -> (String, String) {
    loop {
        assert!(readable(store, 5000), "no event in 5 s");
        if let Some(WatchEvent { path, token }) = store.take_event().unwrap() {
            return (path, token);
        }
    }
}

/// Asserts that nothing is reported: all operations have been answered, so their events have arrived.
fn assert_no_event(store: &mut dyn Store) {
    store.read(None, "/").unwrap();
    assert_eq!(store.take_event().unwrap(), None);
    assert!(!readable(store, 0));
}

fn pair(path: &str, token: &str) -> (String, String) {
    (path.to_owned(), token.to_owned())
}

fn code<T>(result: Result<T, StoreError>) -> String {
    match result {
        Err(StoreError::Refused { code, .. }) => code,
        Err(error) => error.to_string(),
        Ok(_) => "done".to_owned(),
    }
}

#[test]
fn all_clients_read_what_one_writes() {
    each_store("written", |one, other, top| {
        let node = format!("{top}/a/b");
        one.write(None, &node, b"x\0y").unwrap();
        assert_eq!(other.read(None, &node).unwrap().unwrap(), b"x\0y");
        one.write(None, &node, b"").unwrap();
        assert_eq!(other.read(None, &node).unwrap().unwrap(), b"");
        assert_eq!(other.read(None, &format!("{top}/a")).unwrap().unwrap(), b"");
        assert_eq!(other.list(None, top).unwrap().unwrap(), ["a"]);
        assert_eq!(other.list(None, &node).unwrap().unwrap(), Vec::<String>::new());
    });
}

#[test]
fn a_missing_node_is_none() {
    each_store("missing", |one, _, top| {
        assert_eq!(one.read(None, &format!("{top}/no")).unwrap(), None);
        assert_eq!(one.list(None, &format!("{top}/no")).unwrap(), None);
        one.remove(None, &format!("{top}/no")).unwrap();
        one.remove(None, &format!("{top}/no/such/node")).unwrap();
        let error = one.set_permissions(None, &format!("{top}/no"), &["n0"]).unwrap_err();
        assert!(matches!(error, StoreError::NoEntry { .. }), "{error}");
    });
}

#[test]
fn removing_a_node_removes_everything_below_it() {
    each_store("removed", |one, _, top| {
        one.write(None, &format!("{top}/a/b/c"), b"1").unwrap();
        one.write(None, &format!("{top}/ab"), b"2").unwrap();
        one.remove(None, &format!("{top}/a")).unwrap();
        assert_eq!(one.read(None, &format!("{top}/a/b/c")).unwrap(), None);
        assert_eq!(one.list(None, top).unwrap().unwrap(), ["ab"]);
    });
}

#[test]
fn an_invalid_path_or_value_is_refused() {
    each_store("refused", |one, _, top| {
        for path in ["", "/a//b", "/a/", "/ä", "/a b"] {
            assert_eq!(code(one.read(None, path)), "EINVAL", "{path:?}");
        }
        assert_eq!(code(one.read(None, "/a\0b")), "EINVAL");
        assert_eq!(code(one.write(None, &format!("{top}/long"), &[b'x'; 4096])), "E2BIG");
        // Linux's device accepts 4096 bytes including the header, xenstored without it.
        let room = 4096 - 16 - top.len() - "/most\0".len();
        one.write(None, &format!("{top}/most"), &vec![b'x'; room]).unwrap();
        assert_eq!(one.read(None, &format!("{top}/most")).unwrap().unwrap().len(), room);
    });
}

#[test]
fn a_long_list_is_complete() {
    each_store("list", |one, _, top| {
        let mut expected: Vec<String> = (0..600).map(|child| format!("a-child-{child:04}")).collect();
        for name in &expected {
            one.write(None, &format!("{top}/{name}"), b"").unwrap();
        }
        let mut names = one.list(None, top).unwrap().unwrap();
        names.sort();
        expected.sort();
        assert_eq!(names, expected);
    });
}

#[test]
fn a_transaction_becomes_visible_when_it_ends() {
    each_store("transaction", |one, other, top| {
        let node = format!("{top}/a");
        let transaction = one.begin().unwrap();
        one.write(Some(transaction), &node, b"1").unwrap();
        assert_eq!(one.read(Some(transaction), &node).unwrap().unwrap(), b"1");
        assert_eq!(other.read(None, &node).unwrap(), None);
        one.end(transaction, true).unwrap();
        assert_eq!(other.read(None, &node).unwrap().unwrap(), b"1");
    });
}

#[test]
fn an_aborted_transaction_changes_nothing() {
    each_store("given-up", |one, other, top| {
        let transaction = one.begin().unwrap();
        one.write(Some(transaction), &format!("{top}/a"), b"1").unwrap();
        one.end(transaction, false).unwrap();
        assert_eq!(other.read(None, &format!("{top}/a")).unwrap(), None);
    });
}

#[test]
fn a_conflicting_transaction_changes_nothing() {
    each_store("overtaken", |one, other, top| {
        let (read, written) = (format!("{top}/read"), format!("{top}/written"));
        one.write(None, &read, b"old").unwrap();
        let transaction = one.begin().unwrap();
        assert_eq!(one.read(Some(transaction), &read).unwrap().unwrap(), b"old");
        one.write(Some(transaction), &written, b"1").unwrap();
        other.write(None, &read, b"new").unwrap();
        assert!(matches!(one.end(transaction, true), Err(StoreError::Again)));
        assert_eq!(one.read(None, &written).unwrap(), None);
        assert_eq!(one.read(None, &read).unwrap().unwrap(), b"new");
    });
}

#[test]
fn transactions_on_different_nodes_do_not_conflict() {
    each_store("apart", |one, other, top| {
        for node in ["a", "b"] {
            one.write(None, &format!("{top}/{node}"), b"0").unwrap();
        }
        let transaction = one.begin().unwrap();
        one.write(Some(transaction), &format!("{top}/a"), b"1").unwrap();
        other.write(None, &format!("{top}/b"), b"2").unwrap();
        one.end(transaction, true).unwrap();
        assert_eq!(other.read(None, &format!("{top}/a")).unwrap().unwrap(), b"1");
    });
}

#[test]
fn a_watch_reports_once_right_away_and_then_changes_below_it() {
    each_store("watch", |one, other, top| {
        one.watch(top, "token").unwrap();
        assert_eq!(event(one), pair(top, "token"));
        other.write(None, &format!("{top}/a/b"), b"1").unwrap();
        assert_eq!(event(one), pair(&format!("{top}/a/b"), "token"));
        other.write(None, &format!("{top}-beside"), b"1").unwrap();
        other.remove(None, &format!("{top}-beside")).unwrap();
        assert_no_event(one);
        one.unwatch(top, "token").unwrap();
        other.write(None, &format!("{top}/a/b"), b"2").unwrap();
        assert_no_event(one);
    });
}

#[test]
fn an_event_that_arrived_with_a_reply_is_still_signalled() {
    each_store("announced", |one, other, top| {
        one.watch(top, "token").unwrap();
        assert_eq!(event(one), pair(top, "token"));
        other.write(None, &format!("{top}/a"), b"1").unwrap();
        one.read(None, top).unwrap();
        assert_eq!(event(one), pair(&format!("{top}/a"), "token"));
        assert_no_event(one);
    });
}

#[test]
fn removing_a_parent_of_a_watched_node_is_reported() {
    each_store("above", |one, other, top| {
        let node = format!("{top}/a/b");
        other.write(None, &node, b"1").unwrap();
        one.watch(&node, "token").unwrap();
        assert_eq!(event(one), pair(&node, "token"));
        other.remove(None, &format!("{top}/a")).unwrap();
        assert_eq!(event(one), pair(&node, "token"));
    });
}

#[test]
fn watches_report_a_transaction_when_it_ends() {
    each_store("told", |one, other, top| {
        one.watch(top, "token").unwrap();
        assert_eq!(event(one), pair(top, "token"));
        let transaction = other.begin().unwrap();
        other.write(Some(transaction), &format!("{top}/a"), b"1").unwrap();
        assert_no_event(one);
        other.end(transaction, true).unwrap();
        assert_eq!(event(one), pair(&format!("{top}/a"), "token"));
    });
}

#[test]
fn adding_a_watch_twice_or_removing_a_missing_one_is_refused() {
    each_store("twice", |one, _, top| {
        one.watch(top, "token").unwrap();
        one.watch(top, "other").unwrap();
        assert_eq!(code(one.watch(top, "token")), "EEXIST");
        let mut events = [event(one), event(one)];
        events.sort();
        assert_eq!(events, [pair(top, "other"), pair(top, "token")]);
        one.unwatch(top, "token").unwrap();
        one.unwatch(top, "other").unwrap();
        assert!(matches!(one.unwatch(top, "token"), Err(StoreError::NoEntry { .. })));
    });
}

#[test]
fn a_relative_path_is_below_our_own_domain() {
    each_store("relative", |one, other, top| {
        let name = format!("tapline-test-{}", std::process::id());
        let whole = format!("/local/domain/0/{name}");
        one.watch(&name, top).unwrap();
        assert_eq!(event(one), pair(&name, top));
        other.write(None, &whole, b"1").unwrap();
        assert_eq!(event(one), pair(&name, top));
        assert_eq!(one.read(None, &name).unwrap().unwrap(), b"1");
        one.unwatch(&name, top).unwrap();
        one.remove(None, &name).unwrap();
        assert_eq!(other.read(None, &whole).unwrap(), None);
        one.write(None, top, b"").unwrap();
    });
}

#[test]
fn permissions_are_accepted_and_validated() {
    each_store("permissions", |one, _, top| {
        one.write(None, top, b"1").unwrap();
        one.set_permissions(None, top, &["n0", "r5", "b7"]).unwrap();
        assert_eq!(code(one.set_permissions(None, top, &["x5"])), "EINVAL");
    });
}
