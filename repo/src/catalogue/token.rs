//! Tokens, with only a hash of each secret: reading the file does not give access to the API.

use api::{Code, Problem, Token};
use rusqlite::{Row, named_params};
use uuid::Uuid;

use super::row::{Id, Json, Time, Word, text};
use super::{Tx, View};

/// SHA-256 of a token's secret.
pub type SecretHash = [u8; 32];

fn of_row(row: &Row<'_>) -> rusqlite::Result<(Token, SecretHash)> {
    let token = Token {
        uuid: row.get::<_, Id>("uuid")?.0,
        name: text(row, "name")?,
        role: row.get::<_, Word<_>>("role")?.0,
        tag: row.get::<_, Option<Json<_>>>("tag")?.map(|json| json.0),
        read_only: row.get("read_only")?,
        created: row.get::<_, Time>("created")?.0,
        expires: row.get::<_, Option<Time>>("expires")?.map(|time| time.0),
    };
    Ok((token, row.get("hash")?))
}

impl View<'_> {
    /// All tokens with the hashes of their secrets, by name.
    pub fn tokens(&self) -> Result<Vec<(Token, SecretHash)>, Problem> {
        self.rows("SELECT * FROM token ORDER BY name", [], of_row)
    }
}

impl Tx<'_> {
    /// Keeps a token. No two have the same name: who revokes one must know which.
    pub fn add_token(&mut self, token: &Token, hash: &SecretHash) -> Result<(), Problem> {
        let taken = self.row("SELECT 1 FROM token WHERE name = ?1", [token.name.as_str()], |_| Ok(()))?;
        if taken.is_some() {
            let what = format!("a token named '{}' already exists", token.name);
            return Err(Problem::new(Code::Exists, what)
                .field("name")
                .advise("choose another name, or revoke that token"));
        }
        self.execute(
            "INSERT INTO token VALUES (:uuid, :name, :hash, :read_only, :created, :expires, :role, :tag)",
            named_params! {
                ":uuid": Id(token.uuid), ":name": token.name.as_str(), ":hash": hash, ":read_only": token.read_only,
                ":created": Time(token.created), ":expires": token.expires.map(Time),
                ":role": Word(token.role), ":tag": token.tag.as_ref().map(Json),
            },
        )?;
        Ok(())
    }

    /// Forgets a token.
    pub fn remove_token(&mut self, uuid: Uuid) -> Result<(), Problem> {
        match self.execute("DELETE FROM token WHERE uuid = ?1", [Id(uuid)])? {
            0 => Err(Problem::new(Code::NotFound, format!("there is no token {uuid}"))),
            _ => Ok(()),
        }
    }
}
