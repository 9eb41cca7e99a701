//! `tapline token`.

use api::{Name, Problem, Token, TokenCreate};
use jiff::{Timestamp, ToSpan};

use crate::column::Column;
use crate::session::{Listing, Session, print};

/// What can be done with tokens. Only root can, on the daemon's host.
#[derive(clap::Subcommand)]
pub enum Verb {
    /// Make a token, and print its secret, which nobody can be told again
    Create {
        /// Whom or what it is for; no two have the same
        name: Name,
        /// It lets see and change nothing
        #[arg(long)]
        read_only: bool,
        /// It ends by itself after so many days [default: it does not]
        #[arg(long, value_name = "DAYS", value_parser = clap::value_parser!(u32).range(1..=36500))]
        expires: Option<u32>,
    },
    /// List the tokens, those that have expired too
    List {
        #[command(flatten)]
        listing: Listing,
    },
    /// End a token, and cut off at once whoever uses it
    Revoke {
        /// Its name or the beginning of its UUID
        token: String,
    },
}

const COLUMNS: &[Column<Token>] = &[
    Column::new("uuid", |token, uuids| uuids.show(token.uuid)),
    Column::new("name", |token, _| token.name.to_string()),
    Column::new("may", |token, _| if token.read_only { "see".into() } else { "change".into() }),
    Column::new("created", |token, _| format!("{:.0}", token.created)),
    Column::new("expires", |token, _| match token.expires {
        Some(at) if at <= Timestamp::now() => "has expired".into(),
        Some(at) => format!("{at:.0}"),
        None => String::new(),
    }),
];

impl Verb {
    /// Does it.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        match self {
            Verb::Create { name, read_only, expires } => {
                let expires =
                    expires.map(|days| Timestamp::now().checked_add((i64::from(days) * 24).hours())).transpose();
                let expires = expires.map_err(|error| Problem::failed("tell when the token ends", error))?;
                let made = session.client.token_create(&TokenCreate { name, read_only, expires }).await?;
                if session.json() { session.value(&made) } else { print(&format!("{}\n", made.secret.as_str())) }
            }
            Verb::List { listing } => session.list(&session.client.tokens().await?, COLUMNS, &listing),
            Verb::Revoke { token } => session.client.token_revoke(session.token(&token).await?).await,
        }
    }
}
