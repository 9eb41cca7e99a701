//! `tapline token`: tokens for access over the network.

use api::{Name, Problem, Role, Tag, Token, TokenCreate};
use arguments::number;
use jiff::{Timestamp, ToSpan};

use crate::column::Column;
use crate::session::{Listing, Session, print};
use crate::word;

/// Operations on tokens. Only root on the daemon's host may use them.
#[derive(clap::Subcommand)]
pub enum TokenVerb {
    /// Create a token and print its secret, which cannot be shown again
    Create {
        /// A unique name that says what the token is for
        name: Name,
        /// What its holder may do: everything but tokens, operate objects with a tag, or read [default: admin]
        #[arg(long, value_parser = word::one_of::<Role>(&["admin", "operator", "reader"]))]
        role: Option<Role>,
        /// The tag of the objects that an operator may plug, unplug, start, stop, resize and take snapshots of
        #[arg(long)]
        tag: Option<Tag>,
        /// Create a read-only token, as --role reader
        #[arg(long, conflicts_with_all = ["role", "tag"])]
        read_only: bool,
        /// Expire after this many days [default: never]
        #[arg(long, value_name = "DAYS", value_parser = number::<u32>(1..=36500))]
        expires: Option<u32>,
    },
    /// List the tokens, including expired ones
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        listing: Listing,
    },
    /// Revoke a token and disconnect its users at once
    #[command(visible_alias = "rm", aliases = ["delete", "remove", "destroy"])]
    Revoke {
        /// Name or UUID prefix
        token: String,
    },
}

const COLUMNS: &[Column<Token>] = &[
    Column::new("uuid", |token, uuids| uuids.show(token.uuid)),
    Column::new("name", |token, _| token.name.to_string()),
    Column::new("access", |token, _| if token.read_only { "ro".into() } else { "rw".into() }),
    Column::new("role", |token, _| match &token.tag {
        Some(tag) => format!("{} of {tag}", token.role),
        None => token.role.to_string(),
    }),
    Column::new("created", |token, _| format!("{:.0}", token.created)),
    Column::new("expires", |token, _| match token.expires {
        Some(at) if at <= Timestamp::now() => "has expired".into(),
        Some(at) => format!("{at:.0}"),
        None => String::new(),
    }),
];

impl TokenVerb {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        match self {
            TokenVerb::Create { name, role, tag, read_only, expires } => {
                let expires =
                    expires.map(|days| Timestamp::now().checked_add((i64::from(days) * 24).hours())).transpose();
                let expires = expires.map_err(|error| Problem::failed("compute the token's expiry time", error))?;
                let made = session
                    .client
                    .token_create(&TokenCreate { uuid: None, name, role, tag, read_only, expires })
                    .await?;
                if session.json() { session.value(&made) } else { print(&format!("{}\n", made.secret.as_str())) }
            }
            TokenVerb::List { listing } => session.list(&session.client.tokens().await?, COLUMNS, &listing),
            TokenVerb::Revoke { token } => session.client.token_revoke(session.token(&token).await?).await,
        }
    }
}
