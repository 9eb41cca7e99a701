//! Responses to requests with an idempotency key, for clients that repeat a request because the response did not reach
//! them.
//!
//! Invariant: a response is recorded in the same commit as the change that it reports, so that neither exists without
//! the other.

use api::Problem;
use jiff::{SignedDuration, Timestamp};
use rusqlite::named_params;
use uuid::Uuid;

use super::row::{Id, Time};
use super::{Tx, View};

/// How long a response is kept. Clients repeat within minutes; a day covers a client that was restarted.
const KEPT_FOR: SignedDuration = SignedDuration::from_hours(24);

/// Answers that are kept, whatever their age: some MiB as a rule, and more than people and scripts ask in a day.
const KEPT_MAX: i64 = 10_000;

/// A request by its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestKey {
    /// Whose key it is.
    pub asker: String,
    /// The key.
    pub key: String,
    /// SHA-256 of the request.
    pub hash: [u8; 32],
}

/// The response to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answered {
    /// A task was started.
    Task(Uuid),
    /// It was done: an HTTP status, and a body.
    Done {
        /// The status.
        status: u16,
        /// The body, empty if there was none.
        body: String,
    },
}

impl View<'_> {
    /// The recorded response to a request with this key by this caller, and the request's hash; `None` if unknown.
    pub fn answered(&self, asker: &str, key: &str) -> Result<Option<([u8; 32], Answered)>, Problem> {
        let sql = "SELECT hash, task, status, body FROM request WHERE asker = ?1 AND key = ?2 AND created > ?3";
        let since = Timestamp::now().saturating_sub(KEPT_FOR).unwrap_or(Timestamp::MIN);
        self.row(sql, (asker, key, Time(since)), |row| {
            let answered = match row.get::<_, Option<Id>>("task")? {
                Some(task) => Answered::Task(task.0),
                None => Answered::Done { status: row.get("status")?, body: row.get("body")? },
            };
            Ok((row.get("hash")?, answered))
        })
    }
}

impl Tx<'_> {
    /// Keeps what a request is answered. The oldest answers give way.
    pub fn keep_answer(&mut self, request: &RequestKey, answered: &Answered) -> Result<(), Problem> {
        let (task, status, body) = match answered {
            Answered::Task(task) => (Some(Id(*task)), None, None),
            Answered::Done { status, body } => (None, Some(*status), Some(body)),
        };
        let now = Timestamp::now();
        self.execute(
            "INSERT OR REPLACE INTO request (asker, key, hash, task, status, body, created)
             VALUES (:asker, :key, :hash, :task, :status, :body, :created)",
            named_params! {
                ":asker": request.asker, ":key": request.key, ":hash": request.hash, ":task": task,
                ":status": status, ":body": body, ":created": Time(now),
            },
        )?;
        let since = now.saturating_sub(KEPT_FOR).unwrap_or(Timestamp::MIN);
        self.execute("DELETE FROM request WHERE created <= ?1", [Time(since)])?;
        self.execute("DELETE FROM request WHERE seq <= (SELECT max(seq) FROM request) - ?1", [KEPT_MAX])?;
        Ok(())
    }
}

#[cfg(test)]
mod test {
    use super::super::Catalogue;
    use super::*;

    fn request(key: &str) -> RequestKey {
        RequestKey { asker: "user 0".into(), key: key.into(), hash: [7; 32] }
    }

    #[tokio::test]
    async fn responses_are_per_caller_and_the_oldest_are_dropped() {
        let room = tempfile::tempdir().unwrap();
        let catalogue = Catalogue::open(&room.path().join("catalogue.db")).unwrap();
        let task = Uuid::new_v4();
        let done = Answered::Done { status: 201, body: "{}".into() };
        let kept = done.clone();
        let write = catalogue.write(move |tx| {
            tx.keep_answer(&request("first"), &Answered::Task(task))?;
            tx.keep_answer(&request("second"), &kept)
        });
        write.await.unwrap();
        let known = |asker: &'static str, key: &'static str| {
            let asked = catalogue.read(move |view| view.answered(asker, key));
            async move { asked.await.unwrap().map(|(_, answered)| answered) }
        };
        assert_eq!(known("user 0", "first").await, Some(Answered::Task(task)));
        assert_eq!(known("user 0", "second").await, Some(done));
        assert_eq!(known("user 1", "first").await, None);
        // One is too old, and others are too many.
        catalogue
            .write(|tx| {
                tx.execute("UPDATE request SET created = '2020-01-01T00:00:00Z' WHERE key = 'second'", []).map(drop)
            })
            .await
            .unwrap();
        assert_eq!(known("user 0", "second").await, None);
        catalogue
            .write(|tx| {
                (0..KEPT_MAX)
                    .try_for_each(|at| tx.keep_answer(&request(&at.to_string()), &Answered::Task(Uuid::nil())))?;
                let left: Option<i64> = tx.row("SELECT count(*) FROM request", [], |row| row.get(0))?;
                assert_eq!(left, Some(KEPT_MAX));
                Ok(())
            })
            .await
            .unwrap();
        assert_eq!(known("user 0", "first").await, None);
        assert_eq!(known("user 0", "0").await, Some(Answered::Task(Uuid::nil())));
    }
}
