//! Redis: against `SET .. NX PX` and `SET .. PX`, on a connection that all tasks share, as the tier's.

#[path = "../../tests/common/redis.rs"]
mod servers;

use oncekey::tier::{RedisDurability, RedisTier};
use redis::cmd;

use crate::load::{ACCOUNT, ENDPOINT, Settings, compare, key};

pub async fn measure(settings: &Settings) {
    if !servers::is_installed() {
        return;
    }
    let (server, durability) = match settings.synced {
        true => (servers::Server::durable().await, RedisDurability::default()),
        false => {
            (servers::Server::start(&["--appendonly", "no"]).await, RedisDurability::Unchecked)
        }
    };
    let tier = RedisTier::builder().durability(durability).connect(&server.url()).await.unwrap();
    let connection = server.connect().await;
    let by_hand = move |number| {
        let mut connection = connection.clone();
        async move {
            let key = format!("{ACCOUNT} {ENDPOINT} {}", key(number));
            let mut set = cmd("SET");
            set.arg(&key).arg(&[7_u8; 40][..]).arg("NX").arg("PX").arg(87_300_000);
            let done: Option<String> = set.query_async(&mut connection).await.unwrap();
            assert!(done.is_some());
            let mut set = cmd("SET");
            set.arg(&key).arg(&[b'x'; 230][..]).arg("PX").arg(86_400_000);
            let () = set.query_async(&mut connection).await.unwrap();
        }
    };
    compare("redis", settings, tier, by_hand).await;
    drop(server);
}
