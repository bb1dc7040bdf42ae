// SHA-256 and HMAC: the examples of FIPS 180-4 and RFC 4231.
#include "base/sha256.h"

#include <set>
#include <string>

#include "test.h"

using namespace mycoll;

TEST(Sha256Test, sha256KnownAnswers) {
  EXPECT_EQ(toHex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(toHex(sha256("abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(toHex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(toHex(sha256("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmn"
                         "hijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu")),
            "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  EXPECT_EQ(toHex(sha256(std::string(1000000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// The digest of all digests of messages of 0 to 300 bytes, as computed by Python's hashlib.
TEST(Sha256Test, sha256OfAnyLength) {
  std::string message, digests;
  for (int i = 0; i <= 300; ++i) {
    digests += asText(sha256(message));
    message += static_cast<char>(i * 7);
  }
  EXPECT_EQ(toHex(sha256(digests)),
            "3b05b530351f50663ba5ac734c246d169eafec6b57c70dc6dc94cad39d04aad8");
}

TEST(Sha256Test, hmacKnownAnswers) {
  struct Case {
    std::string key, message, digest;
  };
  std::string counted;
  for (int i = 1; i <= 25; ++i) counted += static_cast<char>(i);
  const Case cases[] = {
      {std::string(20, '\x0b'), "Hi There",
       "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
      {"Jefe", "what do ya want for nothing?",
       "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
      {std::string(20, '\xaa'), std::string(50, '\xdd'),
       "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
      {counted, std::string(50, '\xcd'),
       "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
      {std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First",
       "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
      {std::string(131, '\xaa'),
       "This is a test using a larger than block-size key and a larger than block-size data. The "
       "key needs to be hashed before being used by the HMAC algorithm.",
       "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
  };
  for (const Case& c : cases) EXPECT_EQ(toHex(hmacSha256(c.key, c.message)), c.digest);
  // RFC 4231 case 5 gives only the first 128 bits.
  EXPECT_EQ(toHex(hmacSha256(std::string(20, '\x0c'), "Test With Truncation").data(), 16),
            "a3b6167473100ee06e0c796c2955552b");
}

TEST(Sha256Test, constantTimeEqualSeesEveryBit) {
  const Digest digest = sha256("x");
  EXPECT(constantTimeEqual(digest, digest));
  EXPECT(constantTimeEqual(nullptr, nullptr, 0));
  for (size_t bit = 0; bit < 256; ++bit) {
    Digest other = digest;
    other[bit / 8] ^= static_cast<uint8_t>(1 << (bit % 8));
    EXPECT(!constantTimeEqual(digest, other));
  }
}

TEST(Sha256Test, randomBytesDiffer) {
  std::set<std::string> seen;
  for (int i = 0; i < 100; ++i) {
    uint8_t bytes[16];
    EXPECT(randomBytes(bytes, sizeof(bytes)).ok());
    seen.insert(toHex(bytes, sizeof(bytes)));
  }
  EXPECT_EQ(seen.size(), size_t{100});
  EXPECT(randomBytes(nullptr, 0).ok());
  EXPECT_EQ(toHex("\x00\xff\x7f", 3), "00ff7f");
}
