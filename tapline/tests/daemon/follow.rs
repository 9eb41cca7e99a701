//! Tests of following events across broken connections, after which events may be lost.

use api::client::{Client, StreamItem};
use api::{Change, Event, ObjectKind};
use uuid::Uuid;

use crate::play::{Played, refused, scene};

fn event(seq: u64) -> Event {
    let at = "2026-11-22T12:00:00Z".parse().unwrap();
    Event {
        seq,
        at,
        kind: ObjectKind::Vdi,
        uuid: Uuid::nil(),
        change: Change::Removed,
        requester: api::Requester::Daemon,
        object: None,
    }
}

/// A stream with one change that then ends.
fn stream(seq: u64) -> Vec<u8> {
    let data = serde_json::to_string(&event(seq)).unwrap();
    format!(": hello\n\nevent: change\nid: {seq}\ndata: {data}\n\nevent: unheard-of\ndata: 1\n\n").into_bytes()
}

fn is_lost(item: &StreamItem) -> bool {
    matches!(item, StreamItem::Lost(_))
}

#[tokio::test]
async fn a_follower_continues_after_its_last_event() {
    let busy = api::Problem::new(api::Code::Overloaded, "too many clients");
    let reset = "event: reset\nid: 40\ndata: {}\n\n";
    let played = Played::new([
        scene("GET", "events", 200, stream(7)),
        refused("GET", "events", &busy),
        scene("GET", "events", 200, stream(8)),
        scene("GET", "events", 200, reset),
        scene("GET", "events", 200, stream(41)),
    ]);
    let mut events = Client::new(played.socket()).events(Some(6)).await.unwrap();
    assert_eq!(events.next().await, StreamItem::Change(Box::new(event(7))));
    assert!(is_lost(&events.next().await));
    assert_eq!(events.next().await, StreamItem::Lost(busy), "not taken for silence");
    assert_eq!(events.next().await, StreamItem::Change(Box::new(event(8))));
    assert!(is_lost(&events.next().await));
    assert_eq!(events.next().await, StreamItem::Reset);
    assert!(is_lost(&events.next().await));
    assert_eq!(events.next().await, StreamItem::Change(Box::new(event(41))));
    let behind: Vec<_> = played.received().into_iter().map(|asked| asked.last_event_id.unwrap()).collect();
    assert_eq!(behind, ["6", "7", "7", "8", "40"]);
}

#[tokio::test]
async fn missed_events_without_a_number_are_reported() {
    let played = Played::new([scene("GET", "events", 200, ""), scene("GET", "events", 200, stream(9))]);
    let mut events = Client::new(played.socket()).events(None).await.unwrap();
    assert!(is_lost(&events.next().await));
    assert_eq!(events.next().await, StreamItem::Reset);
    assert_eq!(events.next().await, StreamItem::Change(Box::new(event(9))));
    assert_eq!(played.received()[1].last_event_id, None);
}

#[tokio::test]
async fn a_daemon_that_is_not_there_at_first_is_a_failure() {
    let directory = tempfile::tempdir().unwrap();
    let problem = Client::new(directory.path().join("none")).events(None).await.unwrap_err();
    assert!(problem.advice.unwrap().contains("systemctl start taplined"));
}
